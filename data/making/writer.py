"""Write a dataset: train.bin or its shards, val.bin, meta.pkl (see tokenfiles.py), safe against interruptions."""

import contextlib
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from config.errors import UserError
from config.folder_lock import one_at_a_time
from data.making import journal
from data.tokenfiles import MAX_ID, dtype_of, meta_problem, split_files


def write_dataset(folder: Path, splits: dict[str, np.ndarray], meta: dict | None) -> None:
    """Write `<split>.bin` for every split, and meta.pkl unless `meta` is None, so that an interruption is harmless.

    splits: split name ('train', 'val', ...) -> 1-D array of integer token ids in 0..65535.
    For tokens that do not fit into memory, and for what an interruption leaves, see TokenWriter.
    Raises UserError for a bad split name or meta, an empty split, ids that do not fit uint16 or meta's vocab_size, and
    a folder that cannot be written to.
    """
    writer = TokenWriter(folder, meta)
    for name, ids in splits.items():
        if np.size(ids) == 0:
            raise UserError(f'split {name!r} is empty; allowed is at least one token id')
        writer.check(name, ids)  # all of them, before anything is written
    with writer:
        for name, ids in splits.items():
            writer.add(name, ids)


class TokenWriter:
    """Writes a dataset whose tokens arrive in arrays; memory is bounded by the largest array.

        with TokenWriter(folder, meta, shard_tokens=100_000_000) as out:
            for ids in arrays:
                out.add('train', ids)

    meta: what meta.pkl shall hold, None for no meta.pkl (GPT-2 BPE).
    shard_tokens: 0 writes train.bin; else train_00000.bin, train_00001.bin, ... of exactly so many tokens, the last one
        of what is left. Other splits are always one file.
    source: what source.json shall hold, None for no source.json.

    The `with` block holds the folder's lock. Everything is written under temporary names; leaving the block publishes it,
    and leaving it by an exception removes it, the older dataset in `folder` staying whole. An interruption while it is
    published loses nothing either: after Ctrl-C the new dataset is complete, after a kill the next preparation of the
    folder completes it (see journal.py), and until then the folder does not look prepared.
    Raises UserError for a bad meta or shard size, on entering for a folder that cannot be written to or holds the progress
    of another preparation, from add() for ids or split names that are not allowed and for a full disk, and on publishing
    when there are no train tokens.
    """

    def __init__(self, folder: Path, meta: dict | None = None, shard_tokens: int = 0, source: dict | None = None):
        self.folder, self.meta, self.shard_tokens, self.source = Path(folder), meta, shard_tokens, source
        problem = '' if meta is None else meta_problem(meta)
        if problem:
            raise UserError(f'meta for {str(folder)!r}: {problem}')
        if type(shard_tokens) is not int or shard_tokens < 0:
            raise UserError(f'shard_tokens={shard_tokens!r}; allowed is a positive whole number, or 0 for one file')
        self.dtype = dtype_of(meta)
        self.max_id = MAX_ID if meta is None else meta['vocab_size'] - 1
        self.tokens: dict[str, int] = {}  # split -> tokens added so far
        self._names: set[str] = set()  # of the files written
        self._open: dict[str, BinaryIO] = {}  # split -> the file being written

    def check(self, split: str, ids: np.ndarray) -> np.ndarray:
        """`ids` as uint16, or as meta says. UserError for a bad split name, or what is no 1-D array of integers that fit."""
        ids = np.asarray(ids)
        if not re.fullmatch(r'[A-Za-z0-9][A-Za-z0-9_-]*', split) or re.search(r'_\d+$', split):
            raise UserError(f'split name {split!r}: allowed are letters, digits, "_" and "-", no number at the end')
        if ids.ndim != 1 or not (np.issubdtype(ids.dtype, np.integer) or ids.size == 0):
            raise UserError(f'split {split!r} has shape {ids.shape} and dtype {ids.dtype}; '
                            'allowed is a 1-D array of integers')
        low, high = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
        if low < 0 or high > self.max_id:
            raise UserError(f'split {split!r} has token id {low if low < 0 else high}; allowed are 0 to {self.max_id}')
        return ids.astype(self.dtype, copy=False)

    def add(self, split: str, ids: np.ndarray) -> None:
        """Append `ids`, a 1-D array of integers in 0..65535 (and below meta's vocab_size), to a split; see check()."""
        ids = self.check(split, ids)
        with journal.as_user_error(self.folder):
            while ids.size:
                done = self.tokens.get(split, 0)
                sharded = self.shard_tokens and split == 'train'
                if split not in self._open:
                    name = f'{split}_{done // self.shard_tokens:05d}.bin' if sharded else f'{split}.bin'
                    self._open[split] = self._new_file(name)
                room = self.shard_tokens - done % self.shard_tokens if sharded else ids.size
                part, ids = ids[:room], ids[room:]
                self._open[split].write(part.tobytes())
                self.tokens[split] = done + part.size
                if part.size == room and sharded:
                    self._close(split)

    def publish(self) -> None:
        """Make the files the dataset; called on leaving the `with` block."""
        with journal.as_user_error(self.folder, '; run the same command again when that is mended'):
            for split in list(self._open):
                self._close(split)
            if not self.tokens.get('train'):
                raise UserError(f'no train tokens for {str(self.folder)!r}; allowed is at least one')
            if self.meta is not None:
                self._write('meta.pkl', pickle.dumps(self.meta))
            if self.source is not None:
                self._write('source.json', json.dumps(self.source, indent=1).encode())
            old = [path.name for split in self.tokens for path in split_files(self.folder, split)]
            # an older meta.pkl would decode the new ids
            journal.publish(self.folder, list(self._names), [*old, 'meta.pkl', 'source.json'], self._state())

    def discard(self) -> None:
        """Remove what was written and not published."""
        self._close_all()
        journal.clear(self.folder)

    def __enter__(self) -> 'TokenWriter':
        with contextlib.ExitStack() as stack:
            with journal.as_user_error(self.folder):
                if not self.folder.exists():
                    stack.callback(_remove_if_empty, self.folder)  # when the lock is released
                self.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(one_at_a_time(self.folder))
            with journal.as_user_error(self.folder):
                self._begin(journal.finish(self.folder))
            self._lock = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self._lock:
            try:
                if kind is None:
                    self.publish()
            finally:  # also after KeyboardInterrupt
                with contextlib.suppress(OSError):  # what cannot be removed now goes with the next preparation
                    self.discard()

    def _begin(self, finished: dict[str, Any]) -> None:
        """Make the folder ready; `finished` is the state of an interrupted publication that was finished just now."""
        folders = [path.name for path in [*self.folder.glob('*.bin'), self.folder / 'meta.pkl'] if path.is_dir()]
        if folders:
            raise UserError(f'{str(self.folder / folders[0])!r} is a folder, where a file of the dataset belongs')
        if 'key' in journal.read_state(self.folder):
            raise UserError(f'{str(self.folder)!r} holds the progress of another preparation: finish it, or remove '
                            'the files .*.tmp there')
        journal.clear(self.folder)

    def _state(self) -> dict[str, Any]:
        """What to note while this dataset is published."""
        return {}

    def _close(self, split: str) -> None:
        with self._open.pop(split) as file:
            sync(file)

    def _close_all(self) -> None:
        for file in self._open.values():
            with contextlib.suppress(OSError):  # it may hold bytes for which the disk has no room
                file.close()
        self._open.clear()

    def _new_file(self, name: str) -> BinaryIO:
        self._names.add(name)
        return open(journal.temporary(self.folder, name), 'wb')

    def _write(self, name: str, data: bytes) -> None:
        with self._new_file(name) as file:
            file.write(data)
            sync(file)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def sync(file: BinaryIO) -> None:
    """Return when what was written to `file` is on disk."""
    file.flush()
    os.fsync(file.fileno())
