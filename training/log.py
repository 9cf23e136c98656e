"""What a run says: nanoGPT's log lines, a live progress line on a terminal, metrics.jsonl; and passes on to trackers."""
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from config.errors import UserError


class RunLog:
    """Log lines and metrics of one run; a context manager, so that files and the progress line are closed properly.

    metrics.jsonl has one JSON object per logged step, in full precision; what is not finite is null there:

        iter, loss, lr              loss of the iteration's last micro-batch, learning rate it was trained with
        time_ms                     of an iteration, averaged since the row before; evaluations do not count
        tokens_per_second           of all processes together
        grad_norm                   of all gradients together, before clipping
        loss_scale                  where float16 is trained with one
        skipped                     iterations without an update so far, resumed ones included (`training.update`)
        model_tflops_per_second     as the model asks for, windows and heads counted (`training.flops.achieved`), all processes
        mfu                         that as a share of the devices' peak, 0 to 1; only where the peak is known. Not the printed
                                    one, which is nanoGPT's: every layer as full attention, an A100's peak
        memory_bytes, memory_peak_bytes, memory_share, data_wait_share (of the time since the first batch)
                                    of the device, or on a CPU of the process (`training.device.memory_use`)
        train_loss, val_loss        where the step was evaluated

    On resume rows from `start_iter` on are dropped: they are written again. A new run keeps the file of the one before as
    metrics_old.jsonl.

    trackers: from `training.trackers`, closed with the log. write: False leaves metrics.jsonl alone. keep_old:
    a copy of metrics.jsonl as it is becomes metrics_old.jsonl first.
    """

    def __init__(self, out_dir: Path, start_iter: int, max_iters: int, trackers=(), write: bool = True,
                 keep_old: bool = False):
        self.path, self.trackers = out_dir / 'metrics.jsonl', trackers
        self.file = self._reopen(start_iter, keep_old) if write else open(os.devnull, 'w')
        self.console = Console()
        self.progress = Progress(
            TextColumn('[bold]{task.description:10}'), BarColumn(bar_width=None), MofNCompleteColumn(),
            TextColumn('loss {task.fields[loss]:.4f}  {task.fields[rate]:,.0f} tokens/s  ETA'), TimeRemainingColumn(),
            console=self.console, transient=True, speed_estimate_period=60,
            disable=not (self.console.is_terminal and sys.stdout.isatty()))  # FORCE_COLOR makes rich believe in pipes
        self.task = self.progress.add_task('training', total=max_iters + 1, completed=start_iter,
                                           loss=float('nan'), rate=0.0)

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, *_):
        self.progress.stop()
        self.file.close()
        for tracker in self.trackers:
            tracker.close()

    def _reopen(self, start_iter, keep_old):
        kept = [row for row in read_metrics(self.path) if row['iter'] < start_iter] if start_iter else []
        if keep_old and self.path.is_file():
            shutil.copy2(self.path, self.path.with_name('metrics_old.jsonl'))
        elif not start_iter and self.path.is_file() and self.path.stat().st_size:
            os.replace(self.path, self.path.with_name('metrics_old.jsonl'))  # of the run that was here before
        temporary = self.path.with_suffix('.tmp')
        try:
            temporary.write_text(''.join(json.dumps(row) + '\n' for row in kept))
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)
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

    def skipped(self, seen) -> None:
        """A line of its own where iterations were skipped since the last one. seen: `training.update.Updates`."""
        if seen.new:
            which = f'iteration {seen.latest}' if seen.new == 1 else f'{seen.new} iterations, the last of them {seen.latest}'
            scale = '' if seen.loss_scale is None else f'; loss scale now {seen.loss_scale:g}'
            self.line(f'skipped {which}: loss or gradients were not finite{scale}')

    def doing(self, what: str) -> None:
        """What the progress line says in front: 'training', 'evaluating'."""
        self.progress.update(self.task, description=what)

    def advance(self, iter_num: int, tokens_per_second: float, loss: float | None = None) -> None:
        fields = {'rate': tokens_per_second} | ({} if loss is None else {'loss': loss})
        self.progress.update(self.task, completed=iter_num + 1, **fields)

    def stepped(self, iter_num: int, evaluated: dict, **row) -> None:
        """Figures of a logged step, with the losses of an evaluation just before it.

        Raises:
            UserError: metrics.jsonl cannot be written to, as on a full disk.
        """
        known = {name: value if math.isfinite(value) else None for name, value in {**row, **evaluated}.items()}
        try:
            self.file.write(json.dumps({'iter': iter_num, **known}) + '\n')
        except OSError as e:
            raise UserError(f'cannot write to {self.path} at iteration {iter_num}: {e.strerror or e}; go on from the latest '
                            'checkpoint with --init_from=resume') from e
        for tracker in self.trackers:
            tracker.stepped(iter_num, row)

    def evaluated(self, iter_num: int, row: dict) -> None:
        for tracker in self.trackers:
            tracker.evaluated(iter_num, row)


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl, up to the first line that is none (a crash may cut the last one short)."""
    rows = []
    for line in path.read_text(errors='replace').splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if type(row) is not dict or type(row.get('iter')) is not int:
            break
        rows.append(row)
    return rows


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
