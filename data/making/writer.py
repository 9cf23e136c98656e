"""Write a dataset (see tokenfiles.py). An interruption leaves either the old one or the new one.

A preparation writes into the folder .new.tmp/ of the dataset's folder. Its progress.json lists
{file: size} up to the last checkpoint; once it says `complete`, publish() replaces the old dataset,
and the next preparation finishes what a killed one left. The file that marks a folder as prepared
(train.bin or train_00000.bin) is removed first and added last.
"""

import contextlib
import json
import os
import pickle
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from config.errors import UserError
from config.files import read_json, regular_only, replacing
from config.folder_lock import one_at_a_time
from data.check import CHECKSUMS, write_checksums
from data.tokenfiles import MAX_ID, TOKEN_DTYPE, dtype_of, meta_problem, split_files

NEW, PROGRESS = '.new.tmp', 'progress.json'
MARKERS = ('train.bin', 'train_00000.bin')


def write_dataset(folder: Path, splits: dict[str, np.ndarray], meta: dict | None) -> None:
    """Write the splits, {'train': 1-D array of token ids, ...}, and meta.pkl unless `meta` is None,
    and print their sizes. Raises UserError like TokenWriter, and for an empty split."""
    with TokenWriter(folder, meta) as out:
        for name, ids in splits.items():
            if np.size(ids) == 0:
                raise UserError(f'split {name!r} is empty; allowed is at least one token id')
            out.add(name, ids)


class TokenWriter:
    """Writes a dataset from arrays of tokens; memory is bounded by the largest array.

        with TokenWriter(folder, meta, shard_tokens=100_000_000) as out:
            for ids in arrays:
                out.add('train', ids)

    meta, source: contents of meta.pkl and source.json; None = no such file.
    shard_tokens: 0 writes train.bin; otherwise train_00000.bin, train_00001.bin, ... of
        `shard_tokens` tokens each (the last may be shorter). Other splits are always one file.
    key: makes the preparation resumable: the settings (plain JSON) that determine the tokens.
    restart: discard the progress of an interrupted preparation.

    The folder is locked inside the `with` block. A normal exit publishes the dataset and prints the
    sizes of its splits; an exception removes the new files and keeps the old dataset, if any.

    With a key, call checkpoint(n) after adding all tokens of the first n documents. The next
    TokenWriter with the same key continues from there, with `documents` = n (initially 0). If the
    earlier preparation only had to be published, entering the block does so and sets `finished`.

    Raises UserError for invalid meta or ids, progress of a different preparation, no train tokens,
    or a folder that is not writable.
    """

    def __init__(self, folder: Path, meta: dict | None = None, shard_tokens: int = 0,
                 source: dict | None = None, key: dict[str, Any] | None = None,
                 restart: bool = False):
        self.folder, self.shard_tokens = Path(folder), shard_tokens
        self.meta, self.source = meta, source
        self.key, self.restart = key, restart
        if meta is not None and (problem := meta_problem(meta)):
            raise UserError(f'meta for {str(folder)!r}: {problem}')
        self.dtype = dtype_of(meta)
        self.max_id = MAX_ID if meta is None else meta['vocab_size'] - 1
        self.tokens: Counter[str] = Counter()  # split -> tokens added so far
        self.documents = 0
        self.finished = False
        self._new = self.folder / NEW
        self._open: dict[str, BinaryIO] = {}  # split -> file being written

    def add(self, split: str, ids: np.ndarray) -> None:
        """Append `ids`, a 1-D array of integers below the vocabulary size, to a split."""
        ids = np.asarray(ids)
        if ids.ndim != 1 or not (np.issubdtype(ids.dtype, np.integer) or ids.size == 0):
            raise UserError(f'split {split!r} has shape {ids.shape} and dtype {ids.dtype}; '
                            'allowed is a 1-D array of integers')
        bad = ids[(ids < 0) | (ids > self.max_id)]
        if bad.size:
            raise UserError(f'{split!r} has token id {bad[0]}; allowed are 0 to {self.max_id}')
        ids = ids.astype(self.dtype, copy=False)
        sharded = self.shard_tokens and split == 'train'
        size = self.shard_tokens if sharded else sys.maxsize  # tokens in a file
        with write_errors(self.folder):
            while ids.size:
                shard, offset = divmod(self.tokens[split], size)
                if split not in self._open:
                    name = f'{split}_{shard:05d}.bin' if sharded else f'{split}.bin'
                    self._open[split] = open(self._new / name, 'ab')
                part, ids = ids[:size - offset], ids[size - offset:]
                self._open[split].write(part.tobytes())
                self.tokens[split] += part.size
                if offset + part.size == size:
                    self._close(split)

    def checkpoint(self, documents: int) -> None:
        """Record that all tokens of the first `documents` documents have been added."""
        self.documents = documents
        with write_errors(self.folder):
            for file in self._open.values():
                _sync(file)
            self._record(complete=False)

    @property
    def resumable(self) -> bool:
        """Whether there is a checkpoint to continue from."""
        return (self._new / PROGRESS).exists()

    def forget(self) -> None:
        """Make the next preparation start from scratch if this one fails."""
        (self._new / PROGRESS).unlink(missing_ok=True)

    def __enter__(self) -> 'TokenWriter':
        with contextlib.ExitStack() as stack, write_errors(self.folder):
            stack.enter_context(one_at_a_time(self.folder))
            self._begin()
            self._lock = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self._lock:
            try:
                if kind is None and not self.finished:
                    self._publish()
            finally:
                for file in self._open.values():
                    with contextlib.suppress(OSError):  # the disk may be full
                        file.close()
                if not self.resumable:
                    shutil.rmtree(self._new, ignore_errors=True)
        for split, n in sorted(self.tokens.items()) if kind is None else ():
            print(f'{split} has {n:,} tokens')

    def _begin(self) -> None:
        """Finish an interrupted publication, then continue from a checkpoint or start over."""
        for path in [*self.folder.glob('*.bin'), self.folder / 'meta.pkl']:
            if path.is_dir():
                raise UserError(f'{str(path)!r} is a folder, where a file of the dataset belongs')
        progress = read_progress(self.folder)
        published = publish(self.folder, progress)
        if progress and not self.restart:
            if not published:
                return self._resume(progress)
            if self.key is not None and self.key == progress['key']:
                self.finished, self.tokens = True, _tokens(progress['files'])
                return
        if self._new.exists():
            shutil.rmtree(self._new)
        self._new.mkdir()

    def _resume(self, progress: dict[str, Any]) -> None:
        """Continue from the last checkpoint, to which the files are truncated. UserError if it is
        from a different preparation."""
        if self.key is None:
            raise UserError(f'{str(self.folder)!r} holds the progress of another preparation: '
                            f'finish it, or remove {NEW} there')
        files, self.documents = progress['files'], progress['documents']
        self.tokens = _tokens(files)
        self._check_key(progress['key'])
        for path in self._new.iterdir():
            if path.name in files:
                with open(path, 'r+b', opener=regular_only) as file:
                    file.truncate(files[path.name])
            elif path.name != PROGRESS:
                path.unlink()

    def _check_key(self, old: dict[str, Any]) -> None:
        """Raise UserError unless progress with settings `old` can be continued with self.key:
        max_tokens may change, to more than there are."""
        limit, done = self.key.get('max_tokens'), self.tokens['train']
        names = [name for name in self.key if self.key[name] != old.get(name)]
        if limit is None or limit > done:
            names = [name for name in names if name != 'max_tokens']
        if names:
            then, now = (', '.join(f'{name}={key.get(name)}'[:300] for name in names)
                         for key in (old, self.key))
            raise UserError(f'{str(self.folder)!r} holds the progress of a preparation with {then} '
                            f'and {done} train tokens so far; this one has {now}: '
                            'continue with those settings, or discard the progress with --restart')

    def _publish(self) -> None:
        with write_errors(self.folder):
            for split in list(self._open):
                self._close(split)
            if not self.tokens['train']:
                raise UserError(f'no train tokens for {str(self.folder)!r}; '
                                'allowed is at least one')
            if self.meta is not None:
                (self._new / 'meta.pkl').write_bytes(pickle.dumps(self.meta))
            if self.source is not None:
                (self._new / 'source.json').write_text(json.dumps(self.source, indent=1))
            write_checksums(self._new)
            try:
                self._record(complete=True)
                publish(self.folder, read_progress(self.folder))
            except KeyboardInterrupt:  # if it is complete, too late to keep the old dataset
                publish(self.folder, read_progress(self.folder))
                raise

    def _record(self, complete: bool) -> None:
        files = {path.name: path.stat().st_size for path in self._new.iterdir()
                 if path.suffix != '.tmp' and path.name != PROGRESS}
        with replacing(self._new / PROGRESS) as part:
            part.write_text(json.dumps({'key': self.key, 'documents': self.documents,
                                        'files': files, 'complete': complete}))

    def _close(self, split: str) -> None:
        with self._open.pop(split) as file:
            _sync(file)


def read_progress(folder: Path) -> dict[str, Any] | None:
    """Return the progress of a preparation in `folder`, None if there is none, or if it is damaged,
    which is reported on stderr. Raises UserError if the preparation's folder is a link."""
    new = folder / NEW
    if new.is_symlink():  # the files in it belong elsewhere
        raise UserError(f'{str(new)!r} is a link, where a folder of the preparation belongs: '
                        'delete it')
    try:
        progress = read_json(new / PROGRESS)
        key, files, documents = (progress[name] for name in ('key', 'files', 'documents'))
        complete = progress.setdefault('complete', False)  # earlier versions do not write it
        found = {path.name: path.stat().st_size for path in new.iterdir()}
        valid = type(documents) is int and documents >= 0 and type(complete) is bool and all(
            type(size) is int and 0 <= size <= found.get(name, size if complete else -1)
            for name, size in files.items())  # of a complete one, some may have been moved
        valid &= not files.keys().isdisjoint(MARKERS) if complete else type(key) is dict
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        valid = False
    if not valid:
        print(f'the progress in {str(folder)!r} is damaged: starting afresh', file=sys.stderr)
        return None
    return progress


def publish(folder: Path, progress: dict[str, Any] | None) -> bool:
    """Replace the dataset in `folder` by the new one, or resume doing so, if `progress` says that
    it is complete. Returns whether it is."""
    if not (progress and progress['complete']):
        return False
    new = folder / NEW
    old = [*split_files(folder, 'train'), *split_files(folder, 'val'), folder / 'source.json',
           folder / 'meta.pkl', folder / CHECKSUMS]  # an old meta.pkl would decode new ids
    for path in sorted(old, key=lambda path: path.name not in MARKERS):
        if path.name not in progress['files'] or (new / path.name).exists():
            path.unlink(missing_ok=True)
    for path in sorted(new.iterdir(), key=lambda path: path.name in MARKERS):
        if path.name in progress['files']:
            os.replace(path, folder / path.name)
    shutil.rmtree(new)
    return True


def _tokens(files: dict[str, int]) -> Counter[str]:
    """Return {split: number of tokens}, given the sizes of files in bytes."""
    tokens = Counter()
    for name, size in files.items():
        if found := re.fullmatch(r'(.+?)(_\d+)?\.bin', name):
            tokens[found[1]] += size // TOKEN_DTYPE.itemsize
    return tokens


@contextlib.contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError in writing to `folder` (disk full, no permission) into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f'cannot write a dataset to {str(folder)!r}: '
                        f'{error.strerror or error}') from None


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
