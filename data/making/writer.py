"""Write a dataset (see tokenfiles.py). An interruption leaves either the old one or the new one.

Folders inside the dataset's folder during a preparation:

    .new.tmp/      the files being written, and progress.json if the preparation can be resumed
    .ready.tmp/    the same, renamed when complete: they are replacing those of the old dataset

publish() finishes what a killed process left in the second. The file that marks a folder as
prepared (train.bin or train_00000.bin) is removed first and added last.
"""

import contextlib
import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from config.errors import UserError
from config.files import read_json, regular_only
from config.folder_lock import one_at_a_time
from data.tokenfiles import MAX_ID, TOKEN_DTYPE, dtype_of, meta_problem, split_files

NEW, READY = '.new.tmp', '.ready.tmp'
PROGRESS, RESULT = 'progress.json', 'result.json'  # not part of the dataset
MARKERS = ('train.bin', 'train_00000.bin')


def write_dataset(folder: Path, splits: dict[str, np.ndarray], meta: dict | None) -> None:
    """Write the splits, {'train': 1-D array of token ids, ...}, and meta.pkl unless `meta` is None,
    and print their sizes. Raises UserError like TokenWriter, and for an empty split."""
    with TokenWriter(folder, meta) as out:
        for name, ids in splits.items():
            if np.size(ids) == 0:
                raise UserError(f'split {name!r} is empty; allowed is at least one token id')
            out.add(name, ids)
    out.report()


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

    The folder is locked inside the `with` block. A normal exit publishes the dataset; an
    exception removes the new files and keeps the old dataset, if any.

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
        self.tokens: dict[str, int] = {}  # split -> tokens added so far
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
        with write_errors(self.folder):
            while ids.size:
                done = self.tokens.get(split, 0)
                shard, offset = divmod(done, self.shard_tokens) if sharded else (0, 0)
                room = self.shard_tokens - offset if sharded else ids.size
                if split not in self._open:
                    name = f'{split}_{shard:05d}.bin' if sharded else f'{split}.bin'
                    self._open[split] = open(self._new / name, 'ab', opener=regular_only)
                part, ids = ids[:room], ids[room:]
                self._open[split].write(part.tobytes())
                self.tokens[split] = done + part.size
                if sharded and part.size == room:
                    self._close(split)

    def checkpoint(self, documents: int) -> None:
        """Record that all tokens of the first `documents` documents have been added."""
        with write_errors(self.folder):
            for file in self._open.values():
                _sync(file)
            files = {path.name: path.stat().st_size for path in self._new.glob('*.bin')}
            progress = {'key': self.key, 'documents': documents, 'files': files}
            self._write('progress.new', json.dumps(progress).encode())
            os.replace(self._new / 'progress.new', self._new / PROGRESS)
        self.documents = documents

    def report(self) -> None:
        """Print the number of tokens of each split."""
        for split, n in sorted(self.tokens.items()):
            print(f'{split} has {n:,} tokens')

    @property
    def resumable(self) -> bool:
        """Return whether there is a checkpoint to continue from."""
        return (self._new / PROGRESS).exists()

    def forget(self) -> None:
        """Make the next preparation start from scratch if this one fails."""
        (self._new / PROGRESS).unlink(missing_ok=True)

    def __enter__(self) -> 'TokenWriter':
        with contextlib.ExitStack() as stack, write_errors(self.folder):
            if not self.folder.exists():
                stack.callback(_remove_if_empty, self.folder)  # when the lock is released
            self.folder.mkdir(parents=True, exist_ok=True)
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
                if self.key is None or not self.resumable:
                    shutil.rmtree(self._new, ignore_errors=True)

    def _begin(self) -> None:
        """Finish an interrupted publication, then continue from a checkpoint or start over."""
        for path in [*self.folder.glob('*.bin'), self.folder / 'meta.pkl']:
            if path.is_dir():
                raise UserError(f'{str(path)!r} is a folder, where a file of the dataset belongs')
        result = publish(self.folder)
        if self.key is not None and not self.restart and result.get('key') == self.key:
            self.finished, self.tokens = True, result['tokens']
        elif self.restart or not self._resume():
            if self._new.exists():
                shutil.rmtree(self._new)
            self._new.mkdir()

    def _resume(self) -> bool:
        """Continue from the last checkpoint, whose files are truncated to it. Returns False if
        there is none. UserError if it is from a different preparation."""
        progress = _read_object(self._new / PROGRESS)
        try:
            key, files, documents = (progress[name] for name in ('key', 'files', 'documents'))
            damaged = type(key) is not dict or type(documents) is not int or any(
                type(size) is not int or Path(name).name != name
                or (self._new / name).stat().st_size < size for name, size in files.items())
        except (OSError, KeyError, TypeError, AttributeError):
            damaged = True
        if damaged:
            if self.resumable:
                print(f'the progress in {str(self.folder)!r} is damaged: starting afresh',
                      file=sys.stderr)
            return False
        if self.key is None:
            raise UserError(f'{str(self.folder)!r} holds the progress of another preparation: '
                            f'finish it, or remove {NEW} there')
        for name, size in files.items():
            split = re.sub(r'(_\d+)?\.bin$', '', name)
            self.tokens[split] = self.tokens.get(split, 0) + size // TOKEN_DTYPE.itemsize
        self._check_key(key)
        self.documents = documents
        for path in self._new.iterdir():
            if path.name in files:
                with open(path, 'r+b', opener=regular_only) as file:
                    file.truncate(files[path.name])
            elif path.name != PROGRESS:
                path.unlink()
        return True

    def _check_key(self, old: dict[str, Any]) -> None:
        """Raise UserError unless progress with settings `old` can be continued with self.key:
        max_tokens may change, to more than there are."""
        limit, done = self.key.get('max_tokens'), self.tokens.get('train', 0)
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
        with write_errors(self.folder, '; run the same command again when that is mended'):
            for split in list(self._open):
                self._close(split)
            if not self.tokens.get('train'):
                raise UserError(f'no train tokens for {str(self.folder)!r}; '
                                'allowed is at least one')
            if self.meta is not None:
                self._write('meta.pkl', pickle.dumps(self.meta))
            if self.source is not None:
                self._write('source.json', json.dumps(self.source, indent=1).encode())
            files = [path.name for path in self._new.iterdir()]
            result = {'key': self.key, 'tokens': self.tokens, 'files': files}
            self._write(RESULT, json.dumps(result).encode())
            try:
                os.replace(self._new, self.folder / READY)
                publish(self.folder)
            except KeyboardInterrupt:  # too late to keep the old dataset
                publish(self.folder)
                raise

    def _close(self, split: str) -> None:
        with self._open.pop(split) as file:
            _sync(file)

    def _write(self, name: str, data: bytes) -> None:
        with open(self._new / name, 'wb', opener=regular_only) as file:
            file.write(data)
            _sync(file)


def publish(folder: Path) -> dict[str, Any]:
    """Replace the dataset in `folder` by a completely written one, or resume doing so. Returns what
    result.json says of it, {} if there was none to publish or all of its files had been moved.
    Raises UserError if a folder of the preparation is a link."""
    ready = folder / READY
    for path in (folder / NEW, ready):
        if path.is_symlink():  # the files in it belong elsewhere
            raise UserError(f'{str(path)!r} is a link, where a folder of the preparation belongs: '
                            'delete it')
    result = _read_object(ready / RESULT)
    if result:
        old = [*split_files(folder, 'train'), *split_files(folder, 'val'),
               folder / 'meta.pkl', folder / 'source.json']  # an old meta.pkl would decode new ids
        # a result of an earlier version lists no files: it had removed the old ones by now
        kept = result.get('files', [path.name for path in old])
        for path in sorted(old, key=_order, reverse=True):
            if path.name not in kept or (ready / path.name).exists():
                path.unlink(missing_ok=True)
        for path in sorted(ready.iterdir(), key=_order):
            if path.name not in (PROGRESS, RESULT):
                os.replace(path, folder / path.name)
    if ready.exists():
        shutil.rmtree(ready)
    return result


def _order(path: Path) -> int:
    """Sort key for adding files (reversed to remove them): owner first, markers last."""
    return 0 if path.name == 'source.json' else 2 if path.name in MARKERS else 1


@contextlib.contextmanager
def write_errors(folder: Path, advice: str = '') -> Iterator[None]:
    """Turn an OSError in writing to `folder` (disk full, no permission) into a UserError."""
    try:
        yield
    except OSError as error:
        not_a_folder = isinstance(error, FileExistsError)
        reason = 'it is not a folder' if not_a_folder else error.strerror or error
        raise UserError(f'cannot write a dataset to {str(folder)!r}: {reason}{advice}') from None


def _read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; {} if it is missing or damaged."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
