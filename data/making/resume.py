"""A token writer for preparations of hours: what it has written survives an interruption, and the next run goes on."""

import os
import sys
from pathlib import Path
from typing import Any

from config.errors import UserError
from data.making import journal
from data.making.writer import TokenWriter, sync
from data.tokenfiles import TOKEN_DTYPE


class ResumableWriter(TokenWriter):
    """Writes train shards and val.bin, GPT-2 BPE, and remembers at every checkpoint() how far it came.

        with ResumableWriter(folder, shard_tokens, key) as out:
            for ids in arrays_after(out.documents):
                out.add('train', ids)
                out.checkpoint(documents_done)

    key: the settings (plain JSON) that decide what the tokens are. Progress of another key is refused with a UserError,
    unless only 'max_tokens' differs and is not reached yet; restart=True removes it. `documents` is what the last
    checkpoint recorded, 0 at first. Files are kept under temporary names after an exception if there was a checkpoint, and
    cut back to it by the next run. `finished` is true if the same preparation had only to be published, which entering
    the block then did: there is nothing to add.
    """

    def __init__(self, folder: Path, shard_tokens: int, key: dict[str, Any], restart: bool = False):
        super().__init__(folder, None, shard_tokens)
        self.key, self.restart, self.documents, self.finished = key, restart, 0, False

    @property
    def saved(self) -> bool:
        """Whether there is progress to go on from."""
        return 'key' in journal.read_state(self.folder)

    def checkpoint(self, documents: int) -> None:
        """From here a later run goes on: all tokens of the first `documents` documents were added."""
        with journal.as_user_error(self.folder):
            for file in self._open.values():
                sync(file)
            journal.write_state(self.folder, {'key': self.key, 'documents': documents, 'tokens': self.tokens})
        self.documents = documents

    def forget(self) -> None:
        """An exception shall remove all progress."""
        journal.temporary(self.folder, 'state').unlink(missing_ok=True)

    def publish(self) -> None:
        """As in TokenWriter, if there is anything left to publish."""
        if not self.finished:
            super().publish()

    def discard(self) -> None:
        """Remove what was written and not published, unless a later run can go on from it."""
        self._close_all()
        if not self.saved:
            super().discard()

    def _state(self) -> dict[str, Any]:
        return {'key': self.key, 'documents': self.documents, 'tokens': self.tokens}

    def _begin(self, finished: dict[str, Any]) -> None:
        state = journal.read_state(self.folder)
        self.finished = not self.restart and finished.get('key') == self.key
        if self.finished:
            self.documents, self.tokens = finished['documents'], finished['tokens']
        elif 'key' not in state or self.restart:
            self.forget()
            super()._begin(finished)
        else:
            sizes = self._sizes(state)
            self._check(state['key'], state['tokens'].get('train', 0) if sizes else 0)
            self._go_on(state, sizes)

    def _check(self, key: Any, done: int) -> None:
        """UserError if progress of the settings `key`, with so many train tokens, cannot become a dataset of ours."""
        others = key if isinstance(key, dict) else {}
        differ = [name for name in self.key if name != 'max_tokens' and self.key[name] != others.get(name)]
        limit = self.key.get('max_tokens')
        there = here = ''
        if differ:
            there, here = (', '.join(f'{name}={key.get(name)}'[:300] for name in differ) for key in (others, self.key))
        elif limit is not None and limit <= done:
            there, here = f'max_tokens={others.get("max_tokens")} and {done} train tokens so far', f'max_tokens={limit}'
        if there:
            raise UserError(f'{str(self.folder)!r} holds the progress of a preparation with {there}; this one has {here}: '
                            'go on with those settings, or discard the progress with --restart')

    def _go_on(self, state: dict[str, Any], sizes: dict[Path, int]) -> None:
        if not sizes:
            print(f'the progress in {str(self.folder)!r} is damaged: starting afresh', file=sys.stderr)
            self.forget()
        for path in journal.left_over(self.folder):
            if path not in sizes and path != journal.temporary(self.folder, 'state'):
                path.unlink()
        for path, size in sizes.items():
            os.truncate(path, size)
            self._names.add(path.name[1:-len('.tmp')])
        if sizes:
            self.tokens, self.documents = state['tokens'], state['documents']
        for split, tokens in self.tokens.items():
            if split == 'val' or tokens % self.shard_tokens:  # not a full shard
                last = 'val.bin' if split == 'val' else f'train_{tokens // self.shard_tokens:05d}.bin'
                self._open[split] = open(journal.temporary(self.folder, last), 'ab')

    def _sizes(self, state: dict[str, Any]) -> dict[Path, int]:
        """File -> bytes at the checkpoint; {} if the files or `state` are damaged."""
        tokens = state.get('tokens')
        if (type(state.get('documents')) is not int or type(tokens) is not dict or not set(tokens) <= {'train', 'val'}
                or not all(type(n) is int and n > 0 for n in tokens.values())):
            return {}
        sizes = {'val.bin': tokens['val']} if 'val' in tokens else {}
        for done in range(0, tokens.get('train', 0), self.shard_tokens):
            sizes[f'train_{done // self.shard_tokens:05d}.bin'] = min(self.shard_tokens, tokens['train'] - done)
        sizes = {journal.temporary(self.folder, name): n * TOKEN_DTYPE.itemsize for name, n in sizes.items()}
        return sizes if all(path.is_file() and path.stat().st_size >= n for path, n in sizes.items()) else {}
