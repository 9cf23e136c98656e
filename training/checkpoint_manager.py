"""A run's checkpoints: their names, which ones to keep, and which one to resume from."""
import itertools
import re
import shutil
import uuid
from pathlib import Path
from typing import NamedTuple

from config.errors import UserError
from training import checkpoint as ckpt
from training.checkpoint import link_or_copy

NUMBERED = re.compile(r'ckpt_(\d{7,})\.pt')


class CheckpointManager:
    """Saves the checkpoints of one run to `folder`.

    ckpt.pt is the latest. ckpt_best.pt has the best validation loss; it is created when a
    worse ckpt.pt replaces that one. ckpt_ITERATION.pt are the `keep` - 1 checkpoints before the
    latest; only older ones of this run are deleted. With keep = 1 none is created or deleted.

    A file with one of these names that belongs to another run, or is ahead of the checkpoint that
    this run resumed from, is renamed with `_old` before the first save would replace it.
    """

    def __init__(self, folder: Path, keep: int = 1):
        self.folder, self.keep = folder, keep
        self.path, self.best_path = folder / 'ckpt.pt', folder / 'ckpt_best.pt'
        self.run = uuid.uuid4().hex
        self.start = -1     # checkpoints of this run up to this iteration belong to it
        self.origin = None  # the file that the run was resumed from
        self.best = None    # the file with the best validation loss
        self.latest = None  # the iteration of ckpt.pt, if that belongs to this run
        self.numbered = {}  # iteration -> file of this run
        self.cleared = False

    def resume(self, origin: Path, saved: dict) -> None:
        """Continue the run that wrote the checkpoint `saved`, read from `origin`."""
        # `origin` belongs to this run even without a run id (nanoGPT's); other such files may not
        self.run = saved.get('run') or self.run
        self.start, self.origin = saved['iter_num'], origin
        self.best = origin if saved.get('holds_best', True) else None
        self.latest = self.start if origin == self.path else None

    def save(self, checkpoint: dict, say=print) -> None:
        """Write ckpt.pt, then name, copy and delete older checkpoints as described above.

        checkpoint: its key `holds_best` tells if it is the best so far. say: called with a line for
            each renamed file.
        Raises:
            UserError: if it cannot be written; names the checkpoint that can still be resumed.
        """
        lines, iteration, best = [], checkpoint['iter_num'], checkpoint['holds_best']
        try:
            ckpt.save_checkpoint(self.path, {**checkpoint, 'run': self.run},
                                 lambda: self._keep_previous(iteration, best, lines))
        except UserError as e:
            if 'shards' in checkpoint:
                shutil.rmtree(self.folder / checkpoint['shards']['folder'], ignore_errors=True)
            raise UserError(f'{e}; {self._left_to_resume()}') from e
        self.latest = iteration
        try:
            self._update_best_and_delete(best)
        except OSError as e:
            raise UserError(f'{self.path} is saved, but older checkpoints cannot be renamed or '
                            f'deleted: {e}; {self._left_to_resume()}') from e
        for line in lines:
            say(line)
        ckpt.delete_unused_shards(self.folder, self.run)

    def _left_to_resume(self):
        if self.latest is not None:
            return f'that of iteration {self.latest} is kept, go on with --init_from=resume'
        if self.origin:
            return f'{self.origin} of iteration {self.start} is kept, go on with ' \
                   f'--init_from=resume --resume_from={self.origin.name}'
        return 'this run has no earlier one'

    def _keep_previous(self, iteration, best, lines):
        """Link the files that the new checkpoint replaces to a new name, if they are to be kept."""
        if not self.cleared:
            self._move_others_aside(lines)
            self.cleared = True
        if not best and self.best not in (None, self.best_path) and self.best.is_file():
            link_or_copy(self.best, self.best_path)
            self.best = self.best_path
            lines.append(f'the best checkpoint so far is kept as {self.best_path}')
        if self.keep > 1 and self.latest not in (None, iteration) and self.path.is_file():
            kept = self.folder / f'ckpt_{self.latest:07d}.pt'
            if kept.is_file() and self.latest not in self.numbered:
                self._rename_old(kept, lines)
            link_or_copy(self.path, kept)
            self.numbered[self.latest] = kept

    def _move_others_aside(self, lines):
        """Before the first save: rename files of other runs, or ahead of `start`."""
        if self.origin != self.path:
            found = peek(self.path)
            self.latest = found.iteration if self._owns(found) else None
        if self.latest is None and self.path.is_file():
            # linked, not moved: ckpt.pt must exist at all times
            self._rename_old(self.path, lines, link_or_copy)
        if self.best_path.is_file() and not self._owns(peek(self.best_path)):
            self._rename_old(self.best_path, lines)
        for path in sorted(self.folder.glob('ckpt_*.pt')):
            if match := NUMBERED.fullmatch(path.name):
                found = peek(path)
                if self._owns(found):
                    self.numbered[int(match[1])] = path
                elif found and found.run == self.run:
                    self._rename_old(path, lines)

    def _owns(self, found):
        return found is not None and found.run == self.run and found.iteration <= self.start

    @staticmethod
    def _rename_old(path, lines, rename=Path.replace):
        kept = _free_name(path)
        rename(path, kept)
        lines.append(f'{path} was there before this run: kept as {kept}')

    def _update_best_and_delete(self, best):
        if best:
            self.best = self.path
            if self.best_path.is_file():
                link_or_copy(self.path, self.best_path)
        if self.keep > 1:
            for iteration in sorted(self.numbered.keys() - {self.latest})[:1 - self.keep]:
                self.numbered.pop(iteration).unlink(missing_ok=True)


def _free_name(path: Path) -> Path:
    """Return the first of ckpt_old.pt, ckpt_old2.pt, ... that is unused or links to this file."""
    for n in itertools.count(1):
        candidate = path.with_name(path.name.replace('ckpt', f'ckpt_old{n if n > 1 else ""}', 1))
        if not candidate.exists() or candidate.samefile(path):
            return candidate


class Peek(NamedTuple):
    """What a checkpoint says of itself; '' where it has no run id, or no `launch_id`."""
    run: str
    iteration: int
    launch: str


def peek(path: Path) -> Peek | None:
    """Look into a checkpoint without reading its tensors; None if missing or unreadable."""
    try:
        found = ckpt.read_file(path, mmap=True)
        run, launch = (text if isinstance(text := found.get(key), str) else ''
                       for key in ('run', 'launch'))
        return Peek(run, int(found['iter_num']), launch)
    except Exception:  # torch raises errors of many types; the file may be anything
        return None


def checkpoint_in(out_dir: str, name: str) -> Path:
    """Return the path given by `resume_from`. Raises UserError if it is not a plain file name."""
    if not name.strip('.') or set(name) & set('/\\\0'):
        raise UserError(f'resume_from={name!r}: must be the name of a file in out_dir, '
                        'as ckpt_best.pt')
    return Path(out_dir) / name


def load_to_resume(path: Path, whole: bool = True) -> dict:
    """Like `load_checkpoint`, but its error lists the other checkpoints in the folder.

    Raises:
        UserError: if the file is missing, damaged, or not a checkpoint.
    """
    try:
        return ckpt.load_checkpoint(path, whole=whole)
    except UserError as e:
        found = {p.name: peek(p) for p in path.parent.glob('ckpt*.pt') if p != path}
        others = sorted(((at.iteration, name) for name, at in found.items() if at), reverse=True)
        if not others:
            raise
        named = ' or '.join(f'--resume_from={name} (iteration {n})' for n, name in others[:4])
        raise UserError(f'{e}; there are other checkpoints: {named}') from e
