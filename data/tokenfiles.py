"""Read nanoGPT's token files: train.bin and val.bin (raw little-endian ids, no header), meta.pkl.

Ids are uint16, or uint32 if specified in meta.pkl (dtype: 'uint32'), for vocabularies of more than
65,536. A big train split may be in shards train_00000.bin, train_00001.bin, ... instead.

meta.pkl is dict(vocab_size: int, itos: dict[int, str], stoi: dict[str, int]); a GPT-2 BPE dataset
has none.
"""
import contextlib
import io
import itertools
import os
import pickle
import re
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from common.errors import UserError, shown
from common.files import read_bytes

TOKEN_DTYPE = np.dtype('<u2')
MAX_ID = 65535
MAX_VOCAB = 2 ** 32  # of uint32 ids
MAX_META_VOCAB = 2 ** 24  # of meta.pkl: a model gets an embedding for each
LLM_C = {20240520, 20240801}  # magic numbers of llm.c's files: GPT-2's and Llama 3's tokens
DTYPES = {'uint16': TOKEN_DTYPE, 'uint32': np.dtype('<u4')}  # by meta.pkl's 'dtype'
MAX_META_BYTES = 8 * 2**20  # the largest legitimate meta.pkl (65,536 entries) is a few MB


def is_prepared(folder: Path) -> bool:
    """Return whether `folder` has a dataset: train.bin or train_00000.bin, and likewise val."""
    return all(any(os.path.isfile(Path(folder) / f'{split}{end}') for end in ('.bin', '_00000.bin'))
               for split in ('train', 'val'))


def split_files(folder: Path, split: str) -> list[Path]:
    """Return a split's existing files: `<split>.bin`, then `<split>_<number>.bin` by number."""
    files = [path for path in Path(folder).glob(f'{split}*.bin')
             if path.is_file() and re.fullmatch(rf'{split}(_\d+)?', path.stem)]
    return sorted(files, key=lambda path: (_number(path), path))


def _number(path: Path) -> int:
    """Return the number at the end of a shard's name, -1 if there is none."""
    return int(path.stem.partition('_')[2] or -1)


def open_split(folder: Path, split: str, vocab_size: int = 0) -> 'TokenSplit':
    """Open the tokens of a split ('train', 'val'), in one file or in shards. Nothing is read yet.
    vocab_size: the model's; 0 = that of meta.pkl, unlimited if there is none.

    Raises a UserError that names the file if there is none, there are shards besides `<split>.bin`,
    a shard number 0, 1, 2, ... is missing or duplicated, or a file is empty or of odd size.
    """
    single, meta = Path(folder) / f'{split}.bin', read_meta(folder)
    files = split_files(folder, split) or [single]
    first = -1 if files == [single] else 0
    for number, path in enumerate(files, first):
        if _number(path) != number:
            raise UserError(f'{str(path)!r} is where shard {number} of {split!r} should be; '
                            f'allowed are {split}.bin alone, or shards with the numbers 0, 1, ...; '
                            'prepare the dataset again')
    return TokenSplit(files, dtype_of(meta), vocab_size or (meta or {}).get('vocab_size', 0))


def dtype_of(meta: dict | None) -> np.dtype:
    """Return the dtype of the ids in the token files of a data set with this meta.pkl."""
    return DTYPES[(meta or {}).get('dtype', 'uint16')]


class TokenSplit:
    """The tokens of one or more files as one sequence, read only in windows.

    The files are not memory-mapped: truncating one while it is in use is an error, not a crash.
    Threads may read at once.
    vocab_size: ids are below it; 0 = unlimited.
    """

    def __init__(self, files: list[Path], dtype: np.dtype = TOKEN_DTYPE, vocab_size: int = 0):
        self.files, self.dtype, self.vocab_size = list(files), dtype, vocab_size or MAX_VOCAB
        sizes = [_n_tokens(path, dtype) for path in self.files]
        self.starts = [0, *itertools.accumulate(sizes)]  # of each file, and the end of the last

    def __len__(self) -> int:
        return self.starts[-1]

    def window(self, start: int, n: int) -> np.ndarray:
        """Read the `n` token ids from position `start`: (n,) uint16 or uint32.

        Raises IndexError if any of them is outside 0 <= position < len(self), UserError if a file
        has become shorter, or cannot be read, or if a token is outside the vocabulary.
        """
        if start < 0 or n < 0 or start + n > self.starts[-1]:
            raise IndexError(f'tokens {start} to {start + n} of {self.starts[-1]}')
        parts = [np.empty(0, self.dtype)]
        for path, first, last in zip(self.files, self.starts, self.starts[1:]):
            a, b = max(start, first), min(start + n, last)
            if a < b:
                parts.append(self._read(path, a - first, b - a))
        return np.concatenate(parts)

    def _read(self, path: Path, start: int, n: int) -> np.ndarray:
        name = f'token file {str(path)!r}'
        try:
            ids = np.fromfile(path, self.dtype, n, offset=start * self.dtype.itemsize)
        except OSError as e:
            raise UserError(f'{name} cannot be read: {e.strerror or e}') from e
        if len(ids) < n:
            raise UserError(f'{name} has become shorter while it was in use')
        if ids.max(initial=0) >= self.vocab_size:
            raise UserError(f'{name} has token {ids.max()}, and the vocabulary {self.vocab_size}: '
                            'it is damaged, or of another tokenizer')
        return ids


def _n_tokens(path: Path, dtype: np.dtype) -> int:
    if not path.is_file():
        raise UserError(f'no token file {str(path)!r}: run the prepare.py of its dataset first')
    size = path.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise UserError(f'token file {str(path)!r} has {size} bytes; allowed is a positive '
                        f'multiple of {dtype.itemsize} ({dtype.name} ids)')
    with contextlib.suppress(OSError), open(path, 'rb') as file:  # `window` reports the error
        # as tokens, each of these numbers would begin with one that GPT-2 does not have
        if int.from_bytes(file.read(4), 'little') in LLM_C:
            raise UserError(f"token file {str(path)!r} has llm.c's header; allowed are ids alone: "
                            'remove its first 1,024 bytes')
    return size // dtype.itemsize


def read_meta(folder: Path) -> dict | None:
    """Read meta.pkl: vocab_size, stoi/itos if present, and other keys that hold a str or an int.

    None if `folder` has no meta.pkl (GPT-2 BPE). People share these files, so only plain
    containers, strings and numbers can be unpickled. Raises UserError if the file is damaged,
    malicious or inconsistent.
    """
    path = Path(folder) / 'meta.pkl'
    try:
        data = read_bytes(path, MAX_META_BYTES)
        meta = _PlainUnpickler(io.BytesIO(data)).load()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # noqa: BLE001  a damaged pickle can raise nearly anything
        reason = ' '.join(str(error).split())[:200] or type(error).__name__
        raise UserError(f'cannot read {str(path)!r}: {reason}; '
                        'allowed is a pickle of plain dict, str, int') from None
    if problem := meta_problem(meta):
        raise UserError(f'{str(path)!r} is not a valid meta.pkl: {problem}')
    return used_keys(meta)


def used_keys(meta: dict) -> dict:
    """Return the part of a meta.pkl without `meta_problem` that programs use."""
    return {key: value for key, value in meta.items()
            if type(key) is str and (key in ('stoi', 'itos') or type(value) in (str, int))}


def meta_problem(meta: Any) -> str:
    """Return what is wrong with an unpickled meta, in one line; '' if nothing."""
    if type(meta) is not dict:
        return f'it holds a {type(meta).__name__}, not a dict'
    vocab_size, dtype = meta.get('vocab_size'), meta.get('dtype', 'uint16')
    if type(dtype) is not str or dtype not in DTYPES:
        return f'dtype is {shown(dtype)}; allowed are {", ".join(DTYPES)}'
    max_id = min(np.iinfo(DTYPES[dtype]).max, MAX_META_VOCAB - 1)
    if type(vocab_size) is not int or not 0 < vocab_size <= max_id + 1:
        return f'vocab_size is {shown(vocab_size)}; allowed is an int from 1 to {max_id + 1}'
    if 'stoi' not in meta and 'itos' not in meta and meta.get('tokenizer') != 'bpe':
        return ''  # nanoGPT's train.py needs only vocab_size
    stoi, itos = meta.get('stoi'), meta.get('itos')
    if type(stoi) is not dict or type(itos) is not dict:
        return 'stoi and itos must both be dicts'
    if not all(type(s) is str and type(i) is int for s, i in stoi.items()):
        return 'stoi must map str to int'
    if len(stoi) != len(itos) or any(itos.get(i) != s for s, i in stoi.items()):
        return 'stoi and itos are not inverse to each other'
    if any(not 0 <= i < vocab_size for i in stoi.values()):
        return f'stoi has ids outside 0 to vocab_size-1 = {vocab_size - 1}'
    return ''


class _PlainUnpickler(pickle.Unpickler):
    """Creates no class instances: pickles can run code only through find_class."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f'it asks for {module}.{name}')
