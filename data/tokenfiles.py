"""Read nanoGPT's token files: train.bin and val.bin (raw little-endian ids, no header), meta.pkl.

Ids are uint16, or uint32 if specified in meta.pkl (dtype: 'uint32'), for vocabularies of more than
65,536. A big train split may be in shards train_00000.bin, train_00001.bin, ... instead of
train.bin.

meta.pkl is dict(vocab_size: int, itos: dict[int, str], stoi: dict[str, int]); a GPT-2 BPE dataset
has none.
"""

import bisect
import functools
import itertools
import os
import pickle
import re
import threading
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from config.errors import UserError

TOKEN_DTYPE = np.dtype('<u2')
MAX_ID = 65535
DTYPES = {'uint16': TOKEN_DTYPE, 'uint32': np.dtype('<u4')}  # by meta.pkl's 'dtype'
MAX_META_BYTES = 64 * 2**20  # the largest legitimate meta.pkl (65,536 entries) is a few MB


def is_prepared(folder: Path) -> bool:
    """Return whether `folder` has a dataset: train.bin or train_00000.bin, and likewise val."""
    return all(any(os.path.isfile(Path(folder) / f'{split}{end}') for end in ('.bin', '_00000.bin'))
               for split in ('train', 'val'))


def split_files(folder: Path, split: str) -> list[Path]:
    """Return a split's existing files: `<split>.bin`, then `<split>_<number>.bin` by number."""
    folder = Path(folder)
    shards = [path for path in folder.glob(f'{split}_*.bin')
              if re.fullmatch(r'_\d+', path.stem[len(split):])]
    single = [path for path in [folder / f'{split}.bin'] if path.is_file()]
    return single + sorted(shards, key=lambda path: (_number(path), path))


def _number(shard: Path) -> int:
    return int(shard.stem.rsplit('_', 1)[1])


def open_split(folder: Path, split: str) -> 'TokenSplit':
    """Open the tokens of a split ('train', 'val'), in one file or in shards, without reading them.

    Raises a UserError that names the file if there is none, there are shards besides `<split>.bin`,
    a shard number 0, 1, 2, ... is missing or duplicated, or a file is empty or of odd size.
    """
    folder = Path(folder)
    files, dtype = split_files(folder, split), dtype_of(read_meta(folder))
    single = folder / f'{split}.bin'
    if files == [single] or not files:
        return TokenSplit([single], dtype)  # raises the error for a missing file
    if single in files:
        raise UserError(f'{str(single)!r} and the shard {files[1].name!r} are both there; '
                        'allowed is one kind: remove the other')
    for number, path in enumerate(files):
        found = _number(path)
        if found < number:
            raise UserError(f'{str(path)!r} and {files[number - 1].name!r} have the same number; '
                            'remove one of them')
        if found > number:
            raise UserError(f"no shard '{split}_{number:05d}.bin' in {str(folder)!r}, "
                            f'but {path.name!r}: allowed are shards numbered from 0 without a gap; '
                            'prepare the dataset again')
    return TokenSplit(files, dtype)


def dtype_of(meta: dict | None) -> np.dtype:
    """Return the dtype of the ids in the token files of a data set with this meta.pkl."""
    return DTYPES[(meta or {}).get('dtype', 'uint16')]


class TokenSplit:
    """The tokens of one or more files as one sequence, read only in windows.

    The files are not memory-mapped: truncating one while it is in use is an error, not a crash.
    """

    MAX_OPEN = 64  # file descriptors

    def __init__(self, files: list[Path], dtype: np.dtype = TOKEN_DTYPE):
        self.files, self.dtype = list(files), dtype
        sizes = [_token_count(path, dtype) for path in self.files]
        self.starts = [0, *itertools.accumulate(sizes)]  # of each file, and the end of the last
        self._lock = threading.Lock()  # threads share each file's position
        self._open = functools.lru_cache(self.MAX_OPEN)(lambda i: open(self.files[i], 'rb'))

    def __len__(self) -> int:
        return self.starts[-1]

    def window(self, start: int, n: int) -> np.ndarray:
        """Read the `n` token ids from position `start`: (n,) uint16 or uint32, read-only.

        Raises:
            IndexError: if any of them is outside 0 <= position < len(self).
            UserError: if a file has become shorter, or cannot be read.
        """
        if start < 0 or n < 0 or start + n > self.starts[-1]:
            raise IndexError(f'tokens {start} to {start + n} of {self.starts[-1]}')
        i = bisect.bisect_right(self.starts, start, hi=len(self.files)) - 1
        parts = [self._read(i, start - self.starts[i], min(n, self.starts[i + 1] - start))]
        while (have := sum(map(len, parts))) < n:
            i += 1
            parts.append(self._read(i, 0, min(n - have, self.starts[i + 1] - self.starts[i])))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def file_of(self, position: int) -> Path:
        """Return the file that contains the token at this position."""
        return self.files[bisect.bisect_right(self.starts, position, hi=len(self.files)) - 1]

    def short_files(self) -> list[Path]:
        """Return (likely truncated) files, except the last, with fewer tokens than the largest."""
        sizes = [end - start for start, end in itertools.pairwise(self.starts)]
        return [path for path, size in zip(self.files[:-1], sizes) if size < max(sizes)]

    def _read(self, i: int, start: int, n: int) -> np.ndarray:
        size = self.dtype.itemsize
        try:
            with self._lock:
                file = self._open(i)
                file.seek(start * size)
                data = file.read(n * size)
        except OSError as e:
            raise UserError(f'token file {str(self.files[i])!r} cannot be read: '
                            f'{e.strerror or e}') from e
        if len(data) < n * size:
            raise UserError(f'token file {str(self.files[i])!r} has become shorter '
                            'while it was in use')
        return np.frombuffer(data, self.dtype)


def open_tokens(path: Path, dtype: np.dtype = TOKEN_DTYPE) -> np.memmap:
    """Map a token file read-only: ids (n_tokens,). UserError if missing, empty or of odd size."""
    _token_count(Path(path), dtype)
    return np.memmap(path, dtype=dtype, mode='r')


def _token_count(path: Path, dtype: np.dtype) -> int:
    if not path.is_file():
        raise UserError(f'no token file {str(path)!r}: run the prepare.py of its dataset first')
    size = path.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise UserError(f'token file {str(path)!r} has {size} bytes; allowed is a positive '
                        f'multiple of {dtype.itemsize} ({dtype.name} ids)')
    return size // dtype.itemsize


def read_meta(folder: Path) -> dict | None:
    """Read meta.pkl: vocab_size, stoi/itos if present, and other keys that hold a str or an int.

    None if `folder` has no meta.pkl (GPT-2 BPE). People share these files, so only plain
    containers, strings and numbers can be unpickled. Raises UserError if the file is damaged,
    malicious or inconsistent.
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
        raise UserError(f'cannot read {str(path)!r}: {reason}; '
                        'allowed is a pickle of plain dict, str, int') from None
    if problem := meta_problem(meta):
        raise UserError(f'{str(path)!r} is not a valid meta.pkl: {problem}')
    return {key: value for key, value in meta.items()
            if type(key) is str and (key in ('stoi', 'itos') or type(value) in (str, int))}


def meta_problem(meta: Any) -> str:
    """Return what is wrong with an unpickled meta, in one line; '' if nothing."""
    if type(meta) is not dict:
        return f'it holds a {type(meta).__name__}, not a dict'
    vocab_size, dtype = meta.get('vocab_size'), meta.get('dtype', 'uint16')
    if type(dtype) is not str or dtype not in DTYPES:
        return f'dtype is {dtype!r:.40}; allowed are {", ".join(DTYPES)}'
    max_id = np.iinfo(DTYPES[dtype]).max
    if type(vocab_size) is not int or not 0 < vocab_size <= max_id + 1:
        short = type(vocab_size) is int and abs(vocab_size) < 10**9
        shown = vocab_size if short else type(vocab_size).__name__
        return f'vocab_size is {shown}; allowed is an int from 1 to {max_id + 1} ({dtype} ids)'
    if 'stoi' not in meta and 'itos' not in meta:
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
