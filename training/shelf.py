"""The checkpoints of a run in its folder: which of them stay, under which names, and which one to go on from."""
import itertools
import re
import uuid
from pathlib import Path

import torch

from config.errors import UserError
from training.checkpoint import keep_beside, load_checkpoint, save_checkpoint

NUMBERED = re.compile(r'ckpt_(\d{7,})\.pt')


class Shelf:
    """The checkpoints of one run, and the names they have in `folder`.

    ckpt.pt is the latest. ckpt_best.pt has the best evaluated validation loss, where ckpt.pt does not; once there, it
    always does. ckpt_ITERATION.pt are the `keep` - 1 before the latest; older ones of this run are deleted, and nothing
    else is. With keep = 1 no such file is made or deleted.

    What stands under one of these names and is not this run's, or is ahead of where it was resumed, is given a name with
    `_old` before this run's first checkpoint takes its place.
    """

    def __init__(self, folder: Path, keep: int = 1):
        self.folder, self.keep = folder, keep
        self.path, self.best_path = folder / 'ckpt.pt', folder / 'ckpt_best.pt'
        self.run, self.start = uuid.uuid4().hex, -1  # checkpoints of this run up to iteration `start` are its own
        self.origin = None  # the file it was resumed from
        self.best = None    # the file that has the best
        self.latest = None  # iteration of ckpt.pt, if that is this run's
        self.numbered = {}  # iteration -> file, of this run
        self.settled = False

    def resume(self, origin: Path, saved: dict) -> None:
        """The run goes on from the checkpoint `saved`, which is the file `origin`."""
        # one that tells no run, such as nanoGPT's, is this run's; others like it may be anybody's
        self.run, self.start, self.origin = _run_of(saved) or self.run, saved['iter_num'], origin
        self.best = origin if saved.get('holds_best', True) else None
        self.latest = self.start if origin == self.path else None

    def save(self, checkpoint: dict, say=print) -> None:
        """Write ckpt.pt, whose `holds_best` says whether it is the best; those it takes the place of stay as said above.

        say: told of each file that got another name.
        Raises:
            UserError: it cannot be written. What there was before is whole, and named.
        """
        lines, iteration, best = [], checkpoint['iter_num'], checkpoint['holds_best']
        try:
            save_checkpoint(self.path, {**checkpoint, 'run': self.run}, lambda: self._make_room(iteration, best, lines))
        except UserError as e:
            raise UserError(f'{e}; {self._left()}') from e
        self.latest = iteration
        try:
            self._tidy(best)
        except OSError as e:
            raise UserError(f'{self.path} is saved, but its older ones cannot be put in order: {e}; {self._left()}') from e
        for line in lines:
            say(line)

    def _left(self):
        """What there is to go on from after a failure."""
        if self.latest is not None:
            return f'that of iteration {self.latest} is kept, go on with --init_from=resume'
        if self.origin:
            return f'{self.origin} of iteration {self.start} is kept, go on with --init_from=resume ' \
                   f'--resume_from={self.origin.name}'
        return 'this run has no earlier one'

    def _make_room(self, iteration, best, lines):
        """Second names for what is about to be replaced."""
        if not self.settled:
            self._settle(lines)
        if not best and self.best not in (None, self.best_path) and self.best.is_file():
            keep_beside(self.best, self.best_path)
            self.best = self.best_path
            lines.append(f'the best checkpoint so far is kept as {self.best_path}')
        if self.keep > 1 and self.latest not in (None, iteration) and self.path.is_file():
            kept = self.folder / f'ckpt_{self.latest:07d}.pt'
            if kept.is_file() and self.latest not in self.numbered:
                self._set_aside(kept, lines)
            keep_beside(self.path, kept)
            self.numbered[self.latest] = kept

    def _settle(self, lines):
        """Before the first save: what is not this run's, or ahead of where it was resumed, steps aside."""
        found = peek(self.path)
        if self.origin != self.path:
            self.latest = found[1] if self._owns(found) else None
        if self.latest is None and self.path.is_file():
            kept = _free_name(self.path)
            keep_beside(self.path, kept)  # and not renamed: there is a ckpt.pt at any time
            lines.append(f'{self.path} was there before this run: kept as {kept}')
        if self.best_path.is_file() and not self._owns(peek(self.best_path)):
            self._set_aside(self.best_path, lines)
        for iteration, path in numbered_files(self.folder):
            found = peek(path)
            if self._owns(found):
                self.numbered[iteration] = path
            elif found and found[0] == self.run:
                self._set_aside(path, lines)
        self.settled = True

    def _owns(self, found):
        return found is not None and found[0] == self.run and found[1] <= self.start

    @staticmethod
    def _set_aside(path, lines):
        kept = _free_name(path)
        path.replace(kept)
        lines.append(f'{path} was there before this run: kept as {kept}')

    def _tidy(self, best):
        """After a save: ckpt_best.pt follows, and what is more than `keep` is deleted."""
        if best:
            self.best = self.path
            if self.best_path.is_file():
                keep_beside(self.path, self.best_path)
        older = sorted(self.numbered.keys() - {self.latest})
        for iteration in older[:-(self.keep - 1)] if self.keep > 1 else []:
            self.numbered.pop(iteration).unlink(missing_ok=True)


def _run_of(checkpoint: dict) -> str:
    """Which run wrote a checkpoint; '' for nanoGPT's, and for ours of before there was such a key."""
    return str(checkpoint.get('run', ''))


def _free_name(path: Path) -> Path:
    """ckpt.pt -> ckpt_old.pt, ckpt_old2.pt, ...: the first that is free, or that is a second name of this very file."""
    for n in itertools.count(1):
        candidate = path.with_name(path.name.replace('ckpt', f'ckpt_old{n if n > 1 else ""}', 1))
        if not candidate.exists() or candidate.samefile(path):
            return candidate


def numbered_files(folder: Path) -> list[tuple[int, Path]]:
    """The ckpt_ITERATION.pt in a folder with their iterations, whoever wrote them, in order."""
    return sorted((int(match[1]), path) for path in folder.glob('ckpt_*.pt') if (match := NUMBERED.fullmatch(path.name)))


def peek(path: Path) -> tuple[str, int] | None:
    """The run and the iteration of a checkpoint, without reading its tensors; None if there is none, or none that loads."""
    try:
        checkpoint = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        return _run_of(checkpoint), int(checkpoint['iter_num'])
    except Exception:  # torch raises many kinds, all meaning the same here
        return None


def launch_of(path: Path) -> str:
    """The `training.distributed.launch_id` that the checkpoint was saved by; '' if there is none, or none that loads."""
    try:
        return str(torch.load(path, map_location='cpu', weights_only=True, mmap=True).get('launch', ''))
    except Exception:  # torch raises many kinds, all meaning the same here
        return ''


def checkpoint_in(out_dir: str, name: str) -> Path:
    """The file that `resume_from` means. Raises UserError: it is no plain name."""
    if not name.strip('.') or set(name) & set('/\\\0'):
        raise UserError(f'resume_from={name!r}: must be the name of a file in out_dir, as ckpt_best.pt')
    return Path(out_dir) / name


def load_to_resume(path: Path, whole: bool = True) -> dict:
    """`load_checkpoint`; where that fails, the error names the other checkpoints in the folder.

    Raises:
        UserError: missing, damaged, or not a checkpoint.
    """
    try:
        return load_checkpoint(path, whole=whole)
    except UserError as e:
        found = [(peek(other), other.name) for other in path.parent.glob('ckpt*.pt') if other != path]
        others = sorted(((at[1], name) for at, name in found if at), reverse=True)
        if not others:
            raise
        named = ' or '.join(f'--resume_from={name} (iteration {iteration})' for iteration, name in others[:4])
        raise UserError(f'{e}; there are other checkpoints: {named}') from e
