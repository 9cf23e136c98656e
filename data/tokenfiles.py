"""Read and write nanoGPT token files: train.bin and val.bin (raw little-endian uint16 ids, no header) and meta.pkl.

meta.pkl is dict(vocab_size: int, itos: dict[int, str], stoi: dict[str, int]); a GPT-2 BPE dataset has none.
"""

import os
import pickle
import re
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from config.errors import UserError

TOKEN_DTYPE = np.dtype('<u2')
MAX_ID = 65535
MAX_META_BYTES = 64 * 2**20  # the largest honest meta.pkl (65,536 entries) is a few MB


def write_dataset(folder: Path, splits: dict[str, np.ndarray], meta: dict | None) -> None:
    """Write `<split>.bin` for every split, and meta.pkl unless `meta` is None, so that an interruption is harmless.

    splits: split name ('train', 'val', ...) -> 1-D array of integer token ids in 0..65535.
    train.bin appears last: its presence marks the dataset complete. A complete older dataset in `folder` stays
    whole until all new files are safely on disk; then its train.bin goes first, so that old and new never mix.
    Raises UserError for a bad split name or meta, an empty split, or ids that do not fit uint16 or meta's vocab_size.
    """
    folder = Path(folder)
    problem = '' if meta is None else _meta_problem(meta)
    if problem:
        raise UserError(f'meta for {str(folder)!r}: {problem}')
    vocab_size = None if meta is None else meta['vocab_size']
    arrays = {f'{name}.bin': _checked_ids(name, ids, vocab_size) for name, ids in splits.items()}
    folder.mkdir(parents=True, exist_ok=True)
    temporary: dict[str, Path] = {}  # final name -> temporary file, in the order of publication
    try:
        if meta is not None:
            with _new_file(folder, 'meta.pkl', temporary) as file:
                pickle.dump(meta, file)
                _sync(file)
        for name in sorted(arrays, key=lambda name: (name == 'train.bin', name)):
            with _new_file(folder, name, temporary) as file:
                arrays[name].tofile(file)
                _sync(file)
        _publish(folder, temporary)
    finally:  # also after KeyboardInterrupt; files already published are no longer at their temporary names
        for path in temporary.values():
            path.unlink(missing_ok=True)


def open_tokens(path: Path) -> np.memmap:
    """Map a token file read-only: uint16 ids of shape (n_tokens,). UserError if it is missing, empty or of odd size."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f'no token file {str(path)!r}: run the prepare.py of its dataset first')
    size = path.stat().st_size
    if size == 0 or size % TOKEN_DTYPE.itemsize:
        raise UserError(f'token file {str(path)!r} has {size} bytes; allowed is a positive even number (uint16 ids)')
    return np.memmap(path, dtype=TOKEN_DTYPE, mode='r')


def read_meta(folder: Path) -> dict | None:
    """Read meta.pkl: vocab_size, and stoi/itos if it has them; other keys survive if they hold a str or an int.

    None when `folder` has no meta.pkl (GPT-2 BPE). People exchange these files, so nothing but plain containers,
    strings and numbers can be unpickled. UserError if the file is damaged, malicious or inconsistent.
    """
    path = Path(folder) / 'meta.pkl'
    if not path.exists():
        return None
    try:
        if path.stat().st_size > MAX_META_BYTES:
            raise pickle.UnpicklingError(f'it is larger than {MAX_META_BYTES} bytes')
        with open(path, 'rb') as file:
            meta = _PlainUnpickler(file).load()
    except Exception as error:  # noqa: BLE001  a damaged pickle can raise nearly anything
        reason = ' '.join(str(error).split())[:200] or type(error).__name__
        raise UserError(f'cannot read {str(path)!r}: {reason}; allowed is a pickle of plain dict, str, int') from None
    problem = _meta_problem(meta)
    if problem:
        raise UserError(f'{str(path)!r} is not a valid meta.pkl: {problem}')
    known = ('vocab_size', 'stoi', 'itos')
    return {key: value for key, value in meta.items() if isinstance(key, str) and (key in known or _is_plain(value))}


class _PlainUnpickler(pickle.Unpickler):
    """Builds no object of any class: code can only run from a pickle through find_class."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f'it asks for {module}.{name}')


def _checked_ids(name: str, ids: np.ndarray, vocab_size: int | None) -> np.ndarray:
    ids = np.asarray(ids)
    if not re.fullmatch(r'[A-Za-z0-9][A-Za-z0-9_-]*', name):
        raise UserError(f'split name {name!r}: allowed are letters, digits, "_" and "-"')
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f'split {name!r} has shape {ids.shape} and dtype {ids.dtype}; '
                        'allowed is a non-empty 1-D array of integers')
    limit = MAX_ID if vocab_size is None else min(MAX_ID, vocab_size - 1)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > limit:
        raise UserError(f'split {name!r} has token id {low if low < 0 else high}; allowed are 0 to {limit}')
    return ids.astype(TOKEN_DTYPE, copy=False)


def _new_file(folder: Path, name: str, temporary: dict[str, Path]) -> BinaryIO:
    temporary[name] = folder / f'.{name}.{os.getpid()}.tmp'  # noted before it exists, so that it cannot be left behind
    return open(temporary[name], 'wb')


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _publish(folder: Path, temporary: dict[str, Path]) -> None:
    (folder / 'train.bin').unlink(missing_ok=True)  # from here until the last replace the dataset is incomplete
    if 'meta.pkl' not in temporary:
        (folder / 'meta.pkl').unlink(missing_ok=True)  # else a stale alphabet would decode the new ids
    for name, path in temporary.items():
        os.replace(path, folder / name)


def _is_plain(value: Any) -> bool:
    return type(value) in (str, int)


def _meta_problem(meta: Any) -> str:
    """What is wrong with an unpickled meta, in one line; '' if nothing."""
    if type(meta) is not dict:
        return f'it holds a {type(meta).__name__}, not a dict'
    vocab_size = meta.get('vocab_size')
    if type(vocab_size) is not int or not 0 < vocab_size <= MAX_ID + 1:
        shown = vocab_size if type(vocab_size) is int and abs(vocab_size) < 10**9 else type(vocab_size).__name__
        return f'vocab_size is {shown}; allowed is an int from 1 to {MAX_ID + 1}'
    if 'stoi' not in meta and 'itos' not in meta:
        return ''  # nanoGPT's train.py needs no more than vocab_size
    stoi, itos = meta.get('stoi'), meta.get('itos')
    if type(stoi) is not dict or type(itos) is not dict:
        return f'stoi and itos must both be dicts, got {type(stoi).__name__} and {type(itos).__name__}'
    if not all(type(s) is str and type(i) is int for s, i in stoi.items()):
        return 'stoi must map str to int'
    if len(stoi) != len(itos) or any(itos.get(i) != s for s, i in stoi.items()):
        return 'stoi and itos are not inverse to each other'
    if any(not 0 <= i < vocab_size for i in stoi.values()):
        return f'stoi has ids outside 0 to vocab_size-1 = {vocab_size - 1}'
    if any(type(i) is not int for i in itos):
        return 'itos must map int to str'
    return ''
