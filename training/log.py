"""What a run says: nanoGPT's log lines, a live progress line on a terminal, metrics.jsonl, Weights & Biases."""
import json
import os
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from config.errors import UserError


class RunLog:
    """Log lines and metrics of one run; a context manager, so that files and the progress line are closed properly.

    metrics.jsonl has one JSON object per logged step: iter, loss (full precision), lr, time_ms, tokens_per_second and,
    where the step was evaluated, train_loss and val_loss. On resume rows from `start_iter` on are dropped: they are
    written again. `write=False` leaves the file alone.
    """

    def __init__(self, out_dir: Path, start_iter: int, max_iters: int, wandb_run=None, write: bool = True):
        self.path, self.wandb_run = out_dir / 'metrics.jsonl', wandb_run
        self.file = self._reopen(start_iter) if write else open(os.devnull, 'w')
        self.console = Console()
        self.progress = Progress(
            TextColumn('[bold]{task.description:10}'), BarColumn(bar_width=None), MofNCompleteColumn(),
            TextColumn('loss {task.fields[loss]:.4f}  {task.fields[rate]:,.0f} tokens/s  ETA'), TimeRemainingColumn(),
            console=self.console, transient=True, disable=not self.console.is_terminal, speed_estimate_period=60)
        self.task = self.progress.add_task('training', total=max_iters + 1, completed=start_iter,
                                           loss=float('nan'), rate=0.0)

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, *_):
        self.progress.stop()
        self.file.close()
        if self.wandb_run is not None:
            self.wandb_run.finish()

    def _reopen(self, start_iter):
        kept = [row for row in read_metrics(self.path) if row['iter'] < start_iter] if start_iter else []
        temporary = self.path.with_suffix('.tmp')
        temporary.write_text(''.join(json.dumps(row) + '\n' for row in kept))
        os.replace(temporary, self.path)
        return open(self.path, 'a', buffering=1)

    def line(self, text: str) -> None:
        """A log line, above the progress line if there is one. A reader that went away (Ctrl-C ends `| tee log` too) must
        not keep the run from saving."""
        try:
            if self.progress.disable:
                print(text, flush=True)
            else:
                self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        except BrokenPipeError:
            sys.stdout = open(os.devnull, 'w')

    def doing(self, what: str) -> None:
        """What the progress line says in front: 'training', 'evaluating'."""
        self.progress.update(self.task, description=what)

    def advance(self, iter_num: int, tokens_per_second: float, loss: float | None = None) -> None:
        fields = {'rate': tokens_per_second} | ({} if loss is None else {'loss': loss})
        self.progress.update(self.task, completed=iter_num + 1, **fields)

    def metrics(self, **row) -> None:
        self.file.write(json.dumps(row) + '\n')

    def wandb(self, **row) -> None:
        if self.wandb_run is not None:
            self.wandb_run.log({name.replace('__', '/'): value for name, value in row.items()})


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl; a last line cut short by a crash is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def start_wandb(s):
    """A Weights & Biases run as nanoGPT starts it, or None when `wandb_log` is False."""
    if not s.wandb_log:
        return None
    try:
        import wandb
    except ImportError as e:
        raise UserError('wandb_log=True needs the wandb package: pip install wandb') from e
    return wandb.init(project=s.wandb_project, name=s.wandb_run_name, config=vars(s))


class Pace:
    """Seconds per step, averaged since it was last read; evaluations do not count."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        self.steps, self.since = 0, time.perf_counter()

    def step(self) -> None:
        self.steps += 1

    def read(self) -> float:
        seconds = (time.perf_counter() - self.since) / self.steps
        self.restart()
        return seconds
