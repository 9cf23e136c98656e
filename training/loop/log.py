"""A run's log: nanoGPT's lines, metrics.jsonl, trackers."""
import contextlib
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError
from common.files import regular_only, replacing
from training.checkpoint.file import link_or_copy

MAX_ROW = 2 ** 16  # characters; a row of train.py has about 500


class RunLog(contextlib.AbstractContextManager):
    """Lines and metrics of one run; a context manager that closes files and trackers.

    metrics.jsonl has one JSON object per logged step, in full precision, null where not finite
    (docs/training.md explains its values). On resume, rows from `start_iter` on are dropped, since
    they will be rewritten. A new run renames the previous run's file to metrics_old.jsonl.

    write: False leaves metrics.jsonl untouched. keep_old: first copy it to metrics_old.jsonl.
    """

    def __init__(self, out_dir: Path, start_iter: int, trackers: list, write: bool, keep_old: bool):
        self.path, self.trackers = out_dir / 'metrics.jsonl', trackers
        self.file = self._reopen(start_iter, keep_old) if write else open(os.devnull, 'w')

    def __exit__(self, *_):
        for file in (self.file, *self.trackers):
            file.close()

    def _reopen(self, start_iter, keep_old):
        if (keep_old or not start_iter) and self.path.is_file() and self.path.stat().st_size:
            link_or_copy(self.path, self.path.with_name('metrics_old.jsonl'))
        with replacing(self.path) as temporary:
            with open(temporary, 'w', encoding='utf-8') as file:
                for row in read_metrics(self.path) if start_iter else ():
                    if row['iter'] < start_iter:
                        file.write(json.dumps(row) + '\n')
        return open(self.path, 'a', buffering=1, opener=regular_only)

    def line(self, text: str) -> None:
        """Print a line. A closed pipe (Ctrl-C also ends `| tee log`) must not keep the run from
        saving."""
        try:
            print(text, flush=True)
        except BrokenPipeError:
            sys.stdout = open(os.devnull, 'w')

    def skipped(self, updates) -> None:
        """Print how many iterations were skipped, if any. updates: as `GuardedUpdate.read`."""
        many = f'{updates.new} iterations, the last of them' if updates.new > 1 else 'iteration'
        scale = '' if updates.loss_scale is None else f'; loss scale now {updates.loss_scale:g}'
        if updates.new:
            self.line(f'skipped {many} {updates.latest}: loss or gradients were not finite{scale}')

    def stepped(self, iter_num: int, evaluated: dict, **row) -> None:
        """Write a step's metrics, with the losses of an evaluation just before it. Raises UserError
        if metrics.jsonl cannot be written to, for example on a full disk."""
        known = {name: value if math.isfinite(value) else None
                 for name, value in {**row, **evaluated}.items()}
        try:
            self.file.write(json.dumps({'iter': iter_num, **known}) + '\n')
        except OSError as e:
            raise UserError(f'cannot write to {self.path} at iteration {iter_num}: '
                            f'{e.strerror or e}; go on from the latest checkpoint with '
                            '--init_from=resume') from e
        for tracker in self.trackers:
            tracker.stepped(iter_num, row)


def read_metrics(path: Path) -> Iterator[dict]:
    """Yield the rows of a metrics.jsonl up to an invalid line: a crash may truncate the last."""
    if not path.is_file():
        return
    with open(path, encoding='utf-8', errors='replace') as file:
        while line := file.readline(MAX_ROW):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                return
            if type(row) is not dict or type(row.get('iter')) is not int:
                return
            yield row


class StepClock:
    """Seconds per step, averaged since the last read; evaluations do not count.

    mfu: nanoGPT's running MFU, -1 in the first iterations. mean_dt: mean seconds per
    iteration, 0 before the second iteration, because the first one also compiles.
    """

    def __init__(self, first: int):
        self.first, self.mfu, self.mean_dt = first, -1.0, 0.0
        self.restart()

    def restart(self) -> None:
        self.steps, self.since = 0, time.perf_counter()

    def read(self) -> float:
        seconds = (time.perf_counter() - self.since) / self.steps
        self.restart()
        return seconds

    def measured(self, run, dt: float) -> None:
        if run.iter_num - self.first >= 5:
            n = run.s.batch_size * run.s.gradient_accumulation_steps // run.ranks.world_size
            now = run.model.estimate_mfu(n * run.s.plan_passes, dt)
            self.mfu = now if self.mfu == -1.0 else 0.9 * self.mfu + 0.1 * now
        if run.iter_num > self.first:
            self.mean_dt = 0.9 * self.mean_dt + 0.1 * dt if self.mean_dt else dt


def check_packages(wandb: bool, tensorboard: bool) -> None:
    """Raise UserError if a package that the settings require is not installed."""
    for wanted, module, package in ((wandb, 'wandb', 'wandb'),
                                    (tensorboard, 'torch.utils.tensorboard', 'tensorboard')):
        try:
            wanted and importlib.import_module(module)
        except ImportError as e:
            raise UserError(f'{package}_log=True needs the {package} package: '
                            f'pip install {package}') from e


def open_trackers(s, out_dir: Path, start_iter: int) -> list:
    """Open the trackers in the settings. TensorBoard's events from `start_iter` on are replaced,
    unless the run only evaluates. Raises UserError if one cannot start."""
    trackers = [WandB(s)] if s.wandb_log else []
    if s.tensorboard_log:
        folder = out_dir / 'tensorboard'
        if folder.is_symlink():  # the events would be written elsewhere
            raise UserError(f'{folder} is a link: delete it')
        trackers.append(TensorBoard(folder, None if s.eval_only else start_iter))
    return trackers


class WandB:
    """Logs a row at each evaluation, as nanoGPT does: iter, train/loss, val/loss, lr and mfu."""

    def __init__(self, s):
        import wandb
        try:
            self.run = wandb.init(project=s.wandb_project, name=s.wandb_run_name, config=s.values())
        except Exception as e:  # noqa: BLE001  its errors have no common base
            reason = ' '.join(str(e).split())[:300]
            raise UserError(f'wandb_log=True, but Weights & Biases cannot start: {reason}; '
                            '`wandb login`, or set WANDB_MODE=offline') from e

    def evaluated(self, iter_num: int, row: dict) -> None:
        self.run.log({'iter': iter_num, **row})

    def stepped(self, iter_num: int, row: dict) -> None:
        pass

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """Logs evaluations under nanoGPT's names, and the metrics of each logged step under step/."""

    def __init__(self, folder: Path, purge_from: int | None):
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(folder, purge_step=purge_from)

    def evaluated(self, iter_num: int, row: dict) -> None:
        for name, value in row.items():
            self.writer.add_scalar(name, value, iter_num)

    def stepped(self, iter_num: int, row: dict) -> None:
        self.evaluated(iter_num, {f'step/{name}': value for name, value in row.items()})

    def close(self) -> None:
        self.writer.close()
