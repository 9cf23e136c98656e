"""Checkpoints on disk: nanoGPT's keys, written whole or not at all, read without running anything."""
import contextlib
import dataclasses
import hashlib
import os
import random
import shutil
from pathlib import Path

import numpy as np
import torch

from config.errors import UserError
from config.gpt_config import GPTConfig
from config.schema import MODEL
from training.fsdp import like
from training.shard_files import fill

REQUIRED = {'model': dict, 'model_args': dict, 'iter_num': int, 'best_val_loss': (torch.Tensor, float), 'config': dict}


def save_checkpoint(path: Path, checkpoint: dict, before_replace=lambda: None) -> None:
    """Write to a temporary file beside `path`, flush it to disk, then rename: a crash leaves the old one or the new one.

    before_replace: called when the new file is whole, just before it takes the place of the old one.
    Raises:
        UserError: the folder cannot be written to, or is full. The previous checkpoint is still whole then.
    """
    temporary, failed = temporary_for(path), []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for stale in path.parent.glob(f'.{path.stem}*.tmp'):  # of a run that was killed while writing
            stale.unlink(missing_ok=True)
        with open(temporary, 'wb') as f:
            torch.save(checkpoint, _Noting(f, failed))
            f.flush()
            os.fsync(f.fileno())
        before_replace()
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as e:
        raise UserError(f'cannot write checkpoint {path}: {[*failed, e][0]}') from e
    finally:
        if temporary.is_file():
            temporary.unlink()


class _Noting:
    """A file that notes why it could not be written to: torch reports a full disk as an error about positions in it."""

    def __init__(self, file, failed: list):
        self.file, self.failed = file, failed

    def write(self, data):
        try:
            return self.file.write(data)
        except OSError as e:
            self.failed.append(e)
            raise

    def flush(self):
        self.file.flush()


def temporary_for(path: Path) -> Path:
    """Where this process writes what is to become `path`."""
    return path.with_name(f'.{path.name}.{os.getpid()}.tmp')


def _sync_folder(folder: Path) -> None:
    """A rename is on disk only when its folder is. Not every system lets a folder be opened or flushed."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def keep_beside(path: Path, kept: Path) -> None:
    """Give the file at `path` a second name in its folder, in place of what may have it; at no time has neither. Where it has
    to be a copy, that is whole and on disk before it takes the name."""
    temporary = temporary_for(kept)
    try:
        try:
            os.link(path, temporary)
        except OSError:  # a file system without hard links
            with open(path, 'rb') as source, open(temporary, 'wb') as f:
                shutil.copyfileobj(source, f, 2 ** 20)
                f.flush()
                os.fsync(f.fileno())
        os.replace(temporary, kept)
        _sync_folder(kept.parent)
    finally:
        temporary.unlink(missing_ok=True)  # also where both were the same file already: then a rename does nothing


def load_checkpoint(path: Path, device='cpu', whole: bool = True) -> dict:
    """The checkpoint at `path`, ours or nanoGPT's; `_orig_mod.` prefixes (of torch.compile) are taken off.

    whole: tensors that lie beside it, in shards, are put back into it (`training.shard_files`).

    Raises:
        UserError: missing, damaged, or not such a checkpoint.
    """
    if not path.is_file():
        raise UserError(f'no checkpoint at {path}: train first, or point --out_dir at a folder with a ckpt.pt')
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)
    except Exception as e:  # torch raises many kinds, all meaning the same here
        reason = str(e).strip().splitlines() or [type(e).__name__]
        raise UserError(f'checkpoint {path} is damaged or not a checkpoint: {reason[0][:200]}') from e
    missing = [key for key in REQUIRED if not isinstance(checkpoint, dict) or key not in checkpoint]
    if missing:
        raise UserError(f'checkpoint {path} lacks {", ".join(missing)}: it needs {", ".join(REQUIRED)}')
    for key, kind in REQUIRED.items():
        if not isinstance(checkpoint[key], kind) or (key == 'iter_num' and checkpoint[key] < 0):
            raise UserError(f'checkpoint {path}: {key} is {str(checkpoint[key])[:50]!r}, which is not such a thing')
    checkpoint['model'] = {str(name).removeprefix('_orig_mod.'): x for name, x in checkpoint['model'].items()}
    if whole and 'shards' in checkpoint:
        fill(path, checkpoint)
    return checkpoint


def config_of(checkpoint: dict, path: Path, **overrides) -> GPTConfig:
    """The GPTConfig in a checkpoint's `model_args`.

    Raises:
        UserError: a field that this version does not know, of another type, or out of its range.
    """
    args, fields = {**checkpoint['model_args'], **overrides}, {f.name: f for f in dataclasses.fields(GPTConfig)}
    for name, value in args.items():
        if name not in fields:
            raise UserError(f'checkpoint {path}: model_args have {name!r}, which this version does not know')
        wanted = type(fields[name].default)
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise UserError(f'checkpoint {path}: model_args have {name}={value!r}, which should be {wanted.__name__}')
    return GPTConfig(**args)


def note_fixed_settings(s, config: GPTConfig) -> None:
    """Print which of the model settings given in `s` differ from those of the trained `config`,
    which stay. (Dropout is no part of trained weights.)"""
    for key in MODEL:
        kept, asked = getattr(config, key.name), getattr(s, key.name)
        if key.name in s.given and kept != asked and key.name != 'dropout':
            print(f'{key.name} = {kept!r}, as in the checkpoint (not {asked!r})')


def load_weights(model, checkpoint: dict, path: Path) -> None:
    """`load_state_dict`, strictly; what does not fit is named in one line."""
    have, want = checkpoint['model'], model.state_dict()
    for problem, names in (('lacks', want.keys() - have.keys()), ('has unknown', have.keys() - want.keys())):
        if names:
            raise UserError(f'checkpoint {path} {problem} {sorted(names)[0]} ({len(names)} in all)')
    for name, x in want.items():
        if not torch.is_tensor(have[name]):
            raise UserError(f'checkpoint {path}: {name} is {type(have[name]).__name__}, not a tensor')
        if have[name].shape != x.shape:
            raise UserError(f'checkpoint {path}: {name} is {tuple(have[name].shape)}, model_args say {tuple(x.shape)}')
    model.load_state_dict(have)


def tokens_id(meta: dict | None) -> str:
    """What the ids of a data set with this meta.pkl stand for: 'gpt2', or a hash of its alphabet. A model is of use with
    no other."""
    if meta is not None and 'recall' in meta:
        return f"recall: {meta['recall']}"
    if meta is None or 'stoi' not in meta:
        return 'gpt2'
    return 'sha256:' + hashlib.sha256(repr(sorted(meta['stoi'].items())).encode()).hexdigest()


@contextlib.contextmanager
def restoring(path: Path, key: str):
    """What goes wrong inside is said to be the fault of `key` in the checkpoint at `path`."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, RuntimeError) as e:
        reason = ' '.join(str(e).split())[:200]
        raise UserError(f'checkpoint {path}: its {key} does not fit: {type(e).__name__}: {reason}') from e


def optimizer_state(optimizer) -> dict:
    """Its `state_dict`, with what is no plain tensor (torchao's 8-bit averages) in parts, so that it can be read without the
    package."""
    state = optimizer.state_dict()
    return {**state, 'state': {i: {name: _in_parts(x) for name, x in its.items()} for i, its in state['state'].items()}}


def _in_parts(x):
    if not hasattr(x, '__tensor_flatten__'):
        return x
    names, about = x.__tensor_flatten__()
    return {'8bit': {name: getattr(x, name) for name in names}, 'about': about}


def _whole(x):
    if not isinstance(x, dict):
        return x
    from torchao.optim.subclass_8bit import OptimState8bit
    return OptimState8bit.__tensor_unflatten__(x['8bit'], x['about'])


def load_optimizer(optimizer, state: dict) -> None:
    """`load_state_dict`, and the shapes, which torch leaves to the first step (a crash where that is fused).

    The settings of the groups, and how the update is computed (`fused`), stay as they are here: the checkpoint may come from
    another kind of device. A state without a step in it is of no use, and is left out, whatever optimizer it is of.
    """
    if not state['state']:
        return
    saved = state['param_groups']
    kept = [{name: x for name, x in group.items() if name != 'params'} for group in optimizer.param_groups]
    groups = [{**group, **own} for group, own in zip(saved, kept)] + saved[len(kept):]
    params = [p for group in optimizer.param_groups for p in group['params']]
    whole = {i: {name: like(params[i], _whole(x)) if torch.is_tensor(x) else _whole(x) for name, x in its.items()}
             for i, its in state['state'].items()}
    optimizer.load_state_dict({'state': whole, 'param_groups': groups})
    for p in (p for group in optimizer.param_groups for p in group['params']):
        for name, x in optimizer.state[p].items():
            if name != 'step' and torch.is_tensor(x) and x.shape != p.shape:
                raise ValueError(f'{name} is {tuple(x.shape)}, its parameter {tuple(p.shape)}')


def rng_state() -> dict:
    """Every generator that training draws from, as tensors and plain values (safe to load without unpickling code)."""
    state = {'torch': torch.get_rng_state()}
    if torch.cuda.is_available():
        state['cuda'] = torch.cuda.get_rng_state_all()
    kind, keys, *rest = np.random.get_state()
    state['numpy'] = [kind, torch.from_numpy(keys.astype(np.int64)), *rest]
    version, internal, gauss = random.getstate()
    state['python'] = [version, list(internal), gauss]
    return state


def set_rng_state(state: dict) -> None:
    """The inverse of `rng_state`."""
    torch.set_rng_state(state['torch'])
    if 'cuda' in state and torch.cuda.is_available() and len(state['cuda']) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state['cuda'])
    kind, keys, *rest = state['numpy']
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = state['python']
    random.setstate((version, tuple(internal), gauss))
