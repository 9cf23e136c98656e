"""A run's checkpoints: their names, which ones to keep, and which one to resume from."""
import itertools
import uuid
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError
from training.checkpoint import file as ckpt
from training.checkpoint.file import link_or_copy


class CheckpointManager:
    """Saves the checkpoints of one run to `folder`: ckpt.pt, the latest, and, if that does not have
    the best validation loss, ckpt_best.pt.

    Files of these names from another run, or ahead of the checkpoint that this run resumed from,
    are renamed with `_old` before the first save.
    """

    def __init__(self, folder: Path):
        self.path, self.best_path = folder / 'ckpt.pt', folder / 'ckpt_best.pt'
        self.run = uuid.uuid4().hex
        self.start = -1       # checkpoints of this run up to this iteration belong to it
        self.origin = None    # the file that the run was resumed from
        self.best = None      # the file with the best validation loss
        self.latest = None    # the iteration of ckpt.pt, if that belongs to this run
        self.alone = False    # whether files of other runs have been renamed

    def resume(self, origin: Path, saved: dict) -> None:
        """Continue the run that wrote the checkpoint `saved`, read from `origin`."""
        # `origin` belongs to this run even without a run id (nanoGPT's); other such files may not
        self.run = saved.get('run') or self.run
        self.start, self.origin = saved['iter_num'], origin
        self.best = origin if saved.get('holds_best', True) else None
        self.latest = self.start if origin == self.path else None

    def save(self, checkpoint: dict, say=print) -> None:
        """Write ckpt.pt, the best so far if `holds_best`. Raises UserError if it cannot be written,
        which names the checkpoint that can still be resumed. say: called for each renamed file."""
        iteration, best = checkpoint['iter_num'], checkpoint['holds_best']
        try:
            ckpt.save_checkpoint(self.path, {**checkpoint, 'run': self.run},
                                 lambda: self._keep_previous(best, say))
        except UserError as e:
            raise UserError(f'{e}; {self._left_to_resume()}') from e
        self.latest = iteration
        try:
            if best:
                self.best = self.path
                if self.best_path.is_file():
                    link_or_copy(self.path, self.best_path)
        except OSError as e:
            raise UserError(f'{self.path} is saved, but {self.best_path} cannot be written: {e}; '
                            f'{self._left_to_resume()}') from e

    def _left_to_resume(self):
        if self.latest is not None:
            return f'that of iteration {self.latest} is kept, go on with --init_from=resume'
        if self.origin:
            return f'{self.origin} of iteration {self.start} is kept, go on with ' \
                   f'--init_from=resume --resume_from={self.origin.name}'
        return 'this run has no earlier one'

    def _keep_previous(self, best, say):
        if not self.alone:
            self._move_others_aside(say)
        if not best and self.best not in (None, self.best_path) and self.best.is_file():
            link_or_copy(self.best, self.best_path)
            self.best = self.best_path
            say(f'the best checkpoint so far is kept as {self.best_path}')

    def _move_others_aside(self, say):
        """Before the first save: rename files of other runs, or ahead of `start`."""
        for path in (self.path, self.best_path):
            if not path.exists():
                continue
            found = peek(path)
            if found and found.run == self.run and found.iteration <= self.start:
                if path == self.path:
                    self.latest = found.iteration
            elif path != self.origin:
                kept = _free_name(path)
                # ckpt.pt is linked, not moved: it must exist at all times
                (link_or_copy if path == self.path else Path.replace)(path, kept)
                say(f'{path} was there before this run: kept as {kept}')
        self.alone = True  # last: if one cannot be renamed, the next save tries again


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


def load_to_resume(path: Path) -> dict:
    """Like `load_checkpoint`, but its error lists the other checkpoints in the folder."""
    try:
        return ckpt.load_checkpoint(path)
    except UserError as e:
        found = {p.name: peek(p) for p in path.parent.glob('ckpt*.pt') if p != path}
        others = sorted(((at.iteration, name) for name, at in found.items() if at), reverse=True)
        if not others:
            raise
        named = ' or '.join(f'--resume_from={name} (iteration {n})' for n, name in others[:4])
        raise UserError(f'{e}; there are other checkpoints: {named}') from e
