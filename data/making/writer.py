"""Write a dataset (see tokenfiles.py) to the folder .new.tmp/ of its folder, then rename its files.

Until then the older dataset stays. A preparation that was killed starts again: the next one removes
what it left. Killed between two renames, it leaves a folder that counts as not prepared, since the
file that marks a folder as prepared (train.bin or train_00000.bin) is removed first and added last.
"""
import contextlib
import os
import pickle
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from common.errors import UserError
from common.folder_lock import one_at_a_time
from data.tokenfiles import MAX_ID, dtype_of, meta_problem, split_files

NEW = '.new.tmp'
MARKERS = ('train.bin', 'train_00000.bin')


class TokenWriter:
    """Writes a dataset from arrays of tokens; memory is bounded by the largest array.

        with TokenWriter(folder, meta, shard_tokens=100_000_000) as out:
            for ids in arrays:
                out.add('train', ids)

    meta: contents of meta.pkl; None = no such file.
    shard_tokens: 0 writes train.bin; otherwise train_00000.bin, train_00001.bin, ... of
        `shard_tokens` tokens each (the last may be shorter). Other splits are always one file.

    The folder is locked inside the `with` block. A normal exit replaces the older dataset and
    prints the sizes of the splits; an exception keeps the older one, and removes the new files.
    Raises UserError for invalid meta or ids, a split without tokens, or a folder that is not
    writable.
    """

    def __init__(self, folder: Path, meta: dict | None = None, shard_tokens: int = 0):
        self.folder, self.meta, self.shard_tokens = Path(folder), meta, shard_tokens
        if meta is not None and (problem := meta_problem(meta)):
            raise UserError(f'meta for {str(folder)!r}: {problem}')
        self.dtype = dtype_of(meta)
        self.max_id = MAX_ID if meta is None else meta['vocab_size'] - 1
        self.tokens: Counter[str] = Counter()  # split -> tokens added so far
        self._new = self.folder / NEW
        self._open: dict[str, BinaryIO] = {}  # split -> file being written

    def add(self, split: str, ids: Sequence[int]) -> None:
        """Append `ids`, a 1-D array or list of integers below the vocabulary size, to a split."""
        ids = np.asarray(ids)
        if ids.ndim != 1 or not (np.issubdtype(ids.dtype, np.integer) or ids.size == 0):
            raise UserError(f'split {split!r} has shape {ids.shape} and dtype {ids.dtype}; '
                            'allowed is a 1-D array of integers')
        bad = ids[(ids < 0) | (ids > self.max_id)]
        if bad.size:
            raise UserError(f'{split!r} has token id {bad[0]}; allowed are 0 to {self.max_id}')
        ids = ids.astype(self.dtype, copy=False)
        self.tokens.setdefault(split, 0)
        sharded = self.shard_tokens and split == 'train'
        size = self.shard_tokens if sharded else sys.maxsize  # tokens in a file
        with write_errors(self.folder):
            while ids.size:
                shard, offset = divmod(self.tokens[split], size)
                if split not in self._open:
                    name = f'{split}_{shard:05d}.bin' if sharded else f'{split}.bin'
                    self._open[split] = open(self._new / name, 'wb')
                part, ids = ids[:size - offset], ids[size - offset:]
                self._open[split].write(part.tobytes())
                self.tokens[split] += part.size
                if offset + part.size == size:
                    self._open.pop(split).close()

    def __enter__(self) -> 'TokenWriter':
        with contextlib.ExitStack() as stack, write_errors(self.folder):
            stack.enter_context(one_at_a_time(self.folder))
            for path in [*self.folder.glob('*.bin'), self.folder / 'meta.pkl']:
                if path.is_dir():
                    raise UserError(f'{str(path)!r} is a folder, not a file of the dataset')
            if os.path.lexists(self._new):
                shutil.rmtree(self._new)  # an error if it is a link
            self._new.mkdir()
            self._lock = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self._lock:
            try:
                if kind is None:
                    with write_errors(self.folder):
                        self._publish()
            finally:
                for file in self._open.values():
                    with contextlib.suppress(OSError):  # the disk may be full
                        file.close()
                shutil.rmtree(self._new, ignore_errors=True)
        for split, n in sorted(self.tokens.items()) if kind is None else ():
            print(f'{split} has {n:,} tokens')

    def _publish(self) -> None:
        """Complete the new dataset, and replace the older one by it."""
        for split in ('train', *self.tokens):
            if not self.tokens[split]:
                raise UserError(f'no {split} tokens for {str(self.folder)!r}: give at least one')
        for file in self._open.values():
            file.close()
        if self.meta is not None:
            (self._new / 'meta.pkl').write_bytes(pickle.dumps(self.meta))
        old = [*split_files(self.folder, 'train'), *split_files(self.folder, 'val'),
               self.folder / 'meta.pkl']
        for path in sorted(old, key=lambda path: path.name not in MARKERS):
            path.unlink(missing_ok=True)  # an old meta.pkl would decode new ids
        for path in sorted(self._new.iterdir(), key=lambda path: path.name in MARKERS):
            os.replace(path, self.folder / path.name)


@contextlib.contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError in writing to `folder` (disk full, no permission) into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f'cannot write a dataset to {str(folder)!r}: '
                        f'{error.strerror or error}') from None
