"""A token writer for preparations of hours: what it has written survives an interruption, and the next run goes on."""

import json
import os
from pathlib import Path
from typing import Any

from data.tokenfiles import TOKEN_DTYPE, TokenWriter

STATE = '.stream-state.tmp'
PART = '.stream.tmp'


class ResumableWriter(TokenWriter):
    """Writes train shards and val.bin, GPT-2 BPE, and remembers at every checkpoint() how far it came.

        with ResumableWriter(folder, shard_tokens, key) as out:
            for ids in arrays_after(out.documents):
                out.add('train', ids)
                out.checkpoint(documents_done)

    key: what must be the same (plain JSON) for a later run to go on; files of another key are removed. `documents` is what
    the last checkpoint recorded, 0 at first. Files are kept under temporary names after an exception if there was a
    checkpoint, and cut back to it by the next run. One process at a time (datasets.one_at_a_time).
    """

    def __init__(self, folder: Path, shard_tokens: int, key: dict):
        super().__init__(folder, None, shard_tokens)
        self.key, self.documents, self.saved = key, 0, False
        self._resume()

    def checkpoint(self, documents: int) -> None:
        """From here a later run goes on: all tokens of the first `documents` documents were added."""
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
        state = {'key': self.key, 'documents': documents, 'tokens': self.tokens}
        new = self.folder / f'.new{STATE}'
        with open(new, 'w') as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.folder / STATE)
        self.documents, self.saved = documents, True

    def publish(self) -> None:
        super().publish()
        (self.folder / STATE).unlink(missing_ok=True)
        self.saved = False

    def discard(self) -> None:
        if self.saved:
            for file in self._open.values():
                file.close()
            self._open.clear()
        else:
            super().discard()

    def _temporary_path(self, name: str) -> Path:
        return self.folder / f'.{name}{PART}'

    def _resume(self) -> None:
        state = self._read_state()
        sizes = self._sizes(state['tokens'])
        for path in self.folder.glob(f'.*{PART}'):
            if path not in sizes:
                path.unlink()
        if not sizes:
            (self.folder / STATE).unlink(missing_ok=True)
            return
        for path, size in sizes.items():
            os.truncate(path, size)
            self._temporary[path.name[1:-len(PART)]] = path
        self.tokens, self.documents, self.saved = state['tokens'], state['documents'], True
        for split in self.tokens:
            last = [path for path in sizes if path.name.startswith(f'.{split}')][-1]
            if split == 'val' or self.tokens['train'] % self.shard_tokens:  # not a full shard
                self._open[split] = open(last, 'ab')

    def _sizes(self, tokens: dict[str, int]) -> dict[Path, int]:
        """File -> bytes at the checkpoint, val first, then the train shards in order; {} if the files do not fit."""
        sizes = {self._temporary_path('val.bin'): tokens['val']} if tokens.get('val') else {}
        for shard in range(-(-tokens.get('train', 0) // self.shard_tokens)):
            path = self._temporary_path(f'train_{shard:05d}.bin')
            sizes[path] = min(self.shard_tokens, tokens['train'] - shard * self.shard_tokens)
        sizes = {path: n * TOKEN_DTYPE.itemsize for path, n in sizes.items()}
        return sizes if all(path.is_file() and path.stat().st_size >= n for path, n in sizes.items()) else {}

    def _read_state(self) -> dict[str, Any]:
        nothing = {'documents': 0, 'tokens': {}}
        try:
            state = json.loads((self.folder / STATE).read_text())
            good = (state['key'] == self.key and type(state['documents']) is int
                    and all(type(n) is int and n > 0 for n in state['tokens'].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return nothing
        return state if good else nothing
