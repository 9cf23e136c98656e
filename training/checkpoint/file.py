"""Checkpoint files: nanoGPT's keys, written atomically, read without running any code."""
import contextlib
import dataclasses
import hashlib
import os
import random
import re
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from common.errors import UserError, shown
from common.files import replacing
from common.gpt_config import GPTConfig
from common.removed import COMMIT, removed
from kv.weights import EMBEDDING, HEAD, MASKS

REQUIRED = {'model': dict, 'model_args': dict, 'iter_num': int,
            'best_val_loss': (torch.Tensor, float, int), 'config': dict}
OPTIONAL = {'launch': str, 'tokens': str, 'meta': (dict, type(None)), 'holds_best': bool,
            'skipped': int}
# what torch says of an object that it does not read
OBJECT = re.compile(r'GLOBAL (\S+) was not')
DIRECTORY = 0x10  # an attribute of MS-DOS, in zip files
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of weights
# parts of names that torch.compile and DistributedDataParallel add
WRAPPERS = {'_orig_mod', 'module'}
RUN = re.compile(r'[0-9a-f]{32}')  # a run's id; it becomes part of names


def save_checkpoint(path: Path, checkpoint: dict, before_replace=lambda: None) -> None:
    """Write a temporary file, flush it to disk, then rename it, so that a crash leaves the old or
    the new one. Raises UserError if that fails. before_replace: called before the renaming."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for stale in path.parent.glob(f'.{path.stem}*.tmp'):  # left by a killed process
            stale.unlink(missing_ok=True)
        with replacing(path) as temporary:
            with _synced(temporary) as f:
                torch.save(checkpoint, f)
            before_replace()
    except (OSError, RuntimeError) as e:
        # torch reports a full disk as an error about file positions
        reason = e if isinstance(e, OSError) else e.__context__ or e
        raise UserError(f'cannot write checkpoint {path}: {reason}') from e


def link_or_copy(path: Path, target: Path) -> None:
    """Replace `target`, in the same folder, by a hard link to `path` or a copy, atomically."""
    with replacing(target) as temporary:
        try:
            os.link(path, temporary)
        except OSError:
            with open(path, 'rb') as source, _synced(temporary) as f:
                shutil.copyfileobj(source, f, 2 ** 20)


@contextlib.contextmanager
def _synced(path):
    """Open a new file to write; at the end it is on the disk."""
    with open(path, 'wb') as f:
        yield f
        f.flush()
        os.fsync(f.fileno())


def read_file(path: Path, mmap: bool = False):
    """Return what torch.save wrote: tensors and plain values, no objects. mmap: do not read the
    tensors yet. Raises an error of nearly any type if the file is damaged."""
    if not zipfile.is_zipfile(path):
        raise ValueError('it is not a zip file, as torch.save writes')
    with ThreadPoolExecutor(1) as pool:
        checked = pool.submit(check_sums, path) if not mmap else None
        loaded = torch.load(path, map_location='cpu', weights_only=True, mmap=mmap)
        if checked:
            checked.result()
    return loaded


def check_sums(path: Path) -> None:
    """Raise ValueError if an entry differs from its CRC-32, which torch does not compare. After
    `torch.serialization.set_crc32_options(False)` all sums are 0, and nothing is compared."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(entry.external_attr & DIRECTORY for entry in entries):
            raise ValueError('it has a directory, for which torch would read nothing')
        if any(entry.CRC for entry in entries) and (name := archive.testzip()):
            raise ValueError(f'{name} in it is not what was written (its CRC-32 differs)')


def load_checkpoint(path: Path) -> dict:
    """Load a checkpoint (ours, nanoGPT's, or a fork's), with the weights named as in `GPT`. Raises
    UserError if the file is missing, damaged, or not a checkpoint."""
    if not path.is_file():
        raise UserError(f'no checkpoint at {path}: train first, or point --out_dir at a folder '
                        'with a ckpt.pt')
    try:
        checkpoint = read_file(path)
    except Exception as e:  # torch raises errors of many types
        if held := OBJECT.search(str(e)):
            raise UserError(f'checkpoint {path} holds a Python object ({held[1]}), which is not '
                            'read because that could run code: save it again with tensors and '
                            'plain numbers only, such as best_val_loss.item()') from e
        # before this, torch advises to load without weights_only
        said = str(e).rpartition('WeightsUnpickler error: ')[2]
        reason = (said.strip().splitlines() or [type(e).__name__])[0]
        raise UserError(f'checkpoint {path} is damaged or not a checkpoint: {reason[:200]}') from e
    has = checkpoint if isinstance(checkpoint, dict) else {}
    if missing := [key for key in REQUIRED if key not in has]:
        raise UserError(f'checkpoint {path} lacks {", ".join(missing)}: '
                        f'it needs {", ".join(REQUIRED)}')
    for key, kind in (REQUIRED | OPTIONAL).items():
        if key not in checkpoint:
            continue
        value = checkpoint[key]
        if (not isinstance(value, kind) or (torch.is_tensor(value) and value.numel() != 1)
                or (key == 'iter_num' and not 0 <= value < 2 ** 63)):
            raise UserError(f'checkpoint {path}: invalid {key} {shown(value)}')
    for name in ('dataset', 'optimizer', 'data_order'):
        if not isinstance(value := checkpoint['config'].get(name, ''), str):
            raise UserError(f'checkpoint {path}: invalid {name} {shown(value)} in its config')
    run = checkpoint.get('run')
    if run is not None and not (isinstance(run, str) and RUN.fullmatch(run)):
        raise UserError(f'checkpoint {path}: invalid run {shown(run)}: an id is 32 '
                        'hexadecimal digits')
    if 'shards' in checkpoint:
        raise UserError(f'checkpoint {path} is in shards; commit {COMMIT} has '
                        '`python -m training.shards`, which joins them into one file')
    checkpoint['model'] = _unwrapped(path, checkpoint['model'])
    _tie(path, checkpoint['model'])
    if not checkpoint.get('optimizer'):  # stripped of it, to be shared
        checkpoint['optimizer'] = {'state': {}, 'param_groups': []}
    return checkpoint


def _unwrapped(path: Path, weights: dict) -> dict:
    """The weights under the names of `GPT`. UserError: if two of them have the same name there."""
    found = {}
    for saved_name, x in weights.items():
        if not isinstance(saved_name, str):
            raise UserError(f'checkpoint {path}: the model has a weight {shown(saved_name)}')
        name = '.'.join(part for part in saved_name.split('.') if part not in WRAPPERS)
        if MASKS.fullmatch(name) and torch.is_tensor(x) and x.dim() in (0, 4):
            continue
        if name in found:
            raise UserError(f'checkpoint {path} has {name} twice, also as {saved_name}')
        if torch.is_tensor(x):
            check_dtype(path, name, x.dtype)
            if x.layout != torch.strided:
                raise UserError(f'checkpoint {path}: {name} is a sparse tensor; allowed are dense')
        found[name] = x
    return found


def check_dtype(path: Path, name: str, dtype: torch.dtype) -> None:
    """Raise UserError if a weight has a dtype that is none of `DTYPES`: loading would cast it."""
    if dtype not in DTYPES:
        raise UserError(f'{path}: {name} is stored as {dtype}: '
                        f'allowed are {", ".join(map(str, DTYPES))}')


def _tie(path: Path, weights: dict) -> None:
    """Add the output layer if only the embedding, which is the same matrix, was saved. UserError:
    if they differ, because loading them would replace one by the other."""
    head, embedding = weights.get(HEAD), weights.get(EMBEDDING)
    if head is None and torch.is_tensor(embedding):
        weights[HEAD] = embedding
    if not all(map(torch.is_tensor, (head, embedding))) or head.shape != embedding.shape:
        return
    # weights that have diverged hold NaN, which equals nothing
    if not torch.equal(head.nan_to_num(), embedding.nan_to_num()):
        raise UserError(f'checkpoint {path} has an output layer ({HEAD}) that differs from its '
                        f'embedding ({EMBEDDING}); here the two are one matrix')


@contextlib.contextmanager
def restoring(path: Path, key: str):
    """Turn errors in the body into a UserError about `key` of the checkpoint at `path`."""
    try:
        yield
    except UserError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError,
            ArithmeticError) as e:
        reason = ' '.join(str(e).split())[:300]
        raise UserError(f'checkpoint {path}: its {key} does not fit: '
                        f'{type(e).__name__}: {reason}') from e


def config_of(checkpoint: dict, path: Path, **overrides) -> GPTConfig:
    """Return the GPTConfig in a checkpoint's `model_args`. Raises UserError if a field is unknown,
    of the wrong type, or out of range."""
    args = {**checkpoint['model_args'], **overrides}
    fields = {f.name: f for f in dataclasses.fields(GPTConfig)}
    for name, value in args.items():
        if name not in fields:
            why = removed(name) or f'{shown(name)}, which this version does not know'
            raise UserError(f'checkpoint {path}: model_args have {why}')
        wanted = type(fields[name].default)
        if type(value) is not wanted and (wanted, type(value)) != (float, int):
            raise UserError(f'checkpoint {path}: model_args have {name}={shown(value)}, '
                            f'which should be {wanted.__name__}')
    return GPTConfig(**args)


def load_weights(model, checkpoint: dict, path: Path) -> None:
    """Load the weights strictly. Raises a UserError that names mismatched tensors."""
    with restoring(path, 'model'):
        model.load_state_dict(checkpoint['model'])


def tokens_id(meta: dict | None) -> str:
    """Return an id of the vocabulary of a data set with this meta.pkl: 'gpt2', or a hash of its
    alphabet. A model only works with its own vocabulary."""
    meta = meta or {}
    if 'recall' in meta:
        return f"recall: {meta['recall']}"
    if 'stoi' not in meta:
        return 'gpt2'
    return 'sha256:' + hashlib.sha256(repr(sorted(meta['stoi'].items())).encode()).hexdigest()


def rng_state() -> dict:
    """Return the state of every generator that training uses, as tensors and plain values."""
    kind, keys, *rest = np.random.get_state()
    version, internal, gauss = random.getstate()
    cuda = {'cuda': torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {}
    return {'torch': torch.get_rng_state(), **cuda, 'python': [version, list(internal), gauss],
            'numpy': [kind, torch.from_numpy(keys.astype(np.int64)), *rest]}


def set_rng_state(state: dict) -> None:
    """Restore a state returned by `rng_state`."""
    torch.set_rng_state(state['torch'])
    cuda = state.get('cuda', ())
    if cuda and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
    kind, keys, *rest = state['numpy']
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = state['python']
    random.setstate((version, tuple(internal), gauss))
