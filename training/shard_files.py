"""Checkpoints of runs whose parameters are shared out (FSDP2): the same ckpt.pt, but for its
tensors, which lie beside it.

    ckpt.pt               all of a checkpoint but weights and moments, and where these are: 'shards'
    shards_RUN_ITERATION/ safetensors files, one a process: model.NAME, optimizer.INDEX.MOMENT

The files are those of torch.distributed.checkpoint (its Hugging Face storage: no pickles), so any
number of processes can go on from them, one included; `training.checkpoint.load_checkpoint` puts
the tensors back, so that everything that reads checkpoints reads these too.
"""
import shutil
import uuid
from pathlib import Path

import torch

from config.errors import UserError

PREFIX = 'shards_'


def storage():
    """torch.distributed.checkpoint with its safetensors reader and writer.

    Raises:
        UserError: the safetensors package is missing.
    """
    try:
        import safetensors  # noqa: F401
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
    except ImportError as e:
        raise UserError(f'checkpoints in shards need the package {e.name}: '
                        "pip install -e '.[hf]'") from e
    return dcp, HuggingFaceStorageReader, HuggingFaceStorageWriter


def split(model: dict, optimizer: dict) -> tuple[dict, dict]:
    """What goes into shards, by its name there, of {parameter: tensor} and an optimizer's
    `state_dict`; and what is left of the latter: its groups, and what has no dimensions (the
    steps)."""
    tensors, left = {f'model.{name}': x for name, x in model.items()}, {}
    for i, state in optimizer['state'].items():
        left[i] = {name: x for name, x in state.items() if not (torch.is_tensor(x) and x.dim())}
        tensors |= {f'optimizer.{i}.{name}': x for name, x in state.items() if name not in left[i]}
    return tensors, {**optimizer, 'state': left}


def merged(optimizer: dict, tensors: dict) -> dict:
    """The optimizer's `state_dict` again, of what `split` left and the tensors."""
    state = {i: dict(its) for i, its in optimizer['state'].items()}
    for key, x in tensors.items():
        room, _, rest = key.partition('.')
        if room == 'optimizer':
            i, _, name = rest.partition('.')
            state.setdefault(int(i), {})[name] = x
    return {**optimizer, 'state': state}


def write(folder: Path, tensors: dict, group=None, alone: bool = False) -> dict:
    """The tensors into `folder`, by all processes of `group` together, or by this one `alone`; what
    the checkpoint must say of them. The folder must be new, and one that all processes see.

    Raises:
        UserError: it cannot be written.
    """
    dcp, _, Writer = storage()
    done = False
    try:
        writer = Writer(str(folder), save_distributed=True)
        dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=alone)
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        done = True
        return {'folder': folder.name, 'files': files}
    except Exception as e:  # CheckpointException has those of all processes
        reason = ' '.join(str(e).split())[:300]
        raise UserError(f'cannot write checkpoint {folder}: {reason}') from e
    finally:
        if not done:
            shutil.rmtree(folder, ignore_errors=True)


def read(path: Path, shards: dict, tensors: dict | None = None, group=None) -> dict:
    """The tensors in the shards of the checkpoint at `path`.

    Args:
        shards: what it says of them.
        tensors: name -> where it is to go (a DTensor takes its own part); None = whole ones, new,
            by this process alone.
    Raises:
        UserError: a file is missing, damaged or of another size, or a tensor is.
    """
    dcp, Reader, _ = storage()
    known, folder = metadata(path, shards), path.parent / shards['folder']
    try:
        alone = tensors is None
        if alone:
            tensors = {key: torch.empty(x.size, dtype=x.properties.dtype)
                       for key, x in known.items()}
        for key, x in tensors.items():
            if key not in known or known[key].size != x.shape:
                has = tuple(known[key].size) if key in known else 'missing'
                raise UserError(f'checkpoint {path}: {key} is {has} in its shards, and should be '
                                f'{tuple(x.shape)}')
        dcp.load(tensors, storage_reader=Reader(str(folder)), process_group=group, no_dist=alone)
        return tensors
    except UserError:
        raise
    except Exception as e:
        raise _unreadable(path, shards, e) from e


def metadata(path: Path, shards: dict) -> dict:
    """name -> size and type of each tensor in the shards of the checkpoint at `path`, whose files
    are all there.

    Raises:
        UserError: a file is missing, damaged or of another size.
    """
    _, Reader, _ = storage()
    folder = path.parent / shards['folder']
    for name, size in shards['files'].items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            what = 'is missing' if found is None else f'has {found:,} bytes'
            raise UserError(f'checkpoint {path}: its shard {folder / name} {what}, and should have '
                            f'{size:,} bytes')
    try:
        return Reader(str(folder)).read_metadata().state_dict_metadata
    except Exception as e:
        raise _unreadable(path, shards, e) from e


def _unreadable(path, shards, e):
    """For what safetensors, json and torch.distributed.checkpoint raise."""
    reason = ' '.join(str(e).split())[:300]
    folder = path.parent / shards['folder']
    return UserError(f'checkpoint {path}: its shards in {folder} cannot be read: {reason}')


def moments(path: Path, shards: dict) -> dict[int, list[str]]:
    """Index of each parameter in the optimizer -> names of its moments in the shards. Raises as
    `metadata`."""
    found: dict[int, list[str]] = {}
    for key in metadata(path, shards):
        room, _, rest = key.partition('.')
        if room == 'optimizer':
            i, _, name = rest.partition('.')
            found.setdefault(int(i), []).append(name)
    return found


def fill(path: Path, checkpoint: dict) -> None:
    """Put the tensors back into the checkpoint at `path`, in place; it is then one without
    shards."""
    shards = checkpoint.pop('shards')
    tensors = read(path, shards)
    checkpoint['model'] = {key.removeprefix('model.'): x for key, x in tensors.items()
                           if key.startswith('model.')}
    # one parameter, as in nanoGPT
    checkpoint['model']['lm_head.weight'] = checkpoint['model']['transformer.wte.weight']
    checkpoint['optimizer'] = merged(checkpoint['optimizer'], tensors)


def new_name(run: str, iteration: int) -> str:
    """Of a folder for the shards of a checkpoint; another each time."""
    return f'{PREFIX}{run[:8]}_{iteration:07d}_{uuid.uuid4().hex[:8]}'


def collect(folder: Path, run: str) -> None:
    """Delete the shards of this run that no checkpoint in the folder names, whatever that is
    called."""
    found = list(folder.glob(f'{PREFIX}{run[:8]}_*'))
    if not found:
        return
    try:
        checkpoints = (torch.load(path, map_location='cpu', weights_only=True, mmap=True)
                       for path in folder.glob('*.pt'))
        named = {checkpoint.get('shards', {}).get('folder') for checkpoint in checkpoints}
    except Exception:  # one that cannot be read may name any of them
        return
    for path in found:
        if path.name not in named:
            shutil.rmtree(path, ignore_errors=True)
