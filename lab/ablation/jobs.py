"""Run several training jobs at once, each in its own processes that can be stopped and resumed."""
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from rich import progress
from rich.console import Console

from config.files import regular_only
from training.log import read_metrics

ROOT = Path(__file__).resolve().parents[2]
POLL = 0.5  # seconds


@dataclass
class Job:
    """Commands (argument lists for this Python; the last may measure) run one after another on one
    device. Progress is read from metrics.jsonl in out_dir; all output goes to train.log there."""
    name: str
    commands: list[list[str]]
    out_dir: Path
    iterations: int
    device: str = ''
    process: subprocess.Popen | None = field(default=None, repr=False)
    stage: int = 0  # index of the running command
    log_start: int = 0  # where its output begins in train.log

    def start(self, threads: int) -> None:
        """Start the current command in its own session, so that Ctrl-C does not reach it too."""
        self.out_dir.mkdir(parents=True, exist_ok=True)
        device = [f'--device={self.device}'] if self.device else []
        command = [sys.executable, *self.commands[self.stage], *device]
        with open(self.out_dir / 'train.log', 'a', opener=regular_only) as log:
            self.log_start = log.tell()
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True, env=environment(threads))

    def iteration(self) -> int:
        """The last logged iteration, at most `iterations`."""
        rows = read_metrics(self.out_dir / 'metrics.jsonl')
        return min(rows[-1]['iter'], self.iterations) if rows else 0

    def error(self) -> str:
        """The error of a command that has ended: '' for status 0, otherwise the last line of its
        output or the signal that killed it."""
        status = self.process.returncode
        if status == 0:
            return ''
        if status < 0:
            name = signal.Signals(-status).name
            hint = ' (was there too little memory?)' if name == 'SIGKILL' else ''
            return f'killed by {name}{hint}'
        output = (self.out_dir / 'train.log').read_bytes()[self.log_start:]
        lines = output.decode(errors='replace').strip().splitlines()
        return lines[-1].strip().removeprefix('error: ') if lines else f'status {status}'


def cores() -> int:
    """Number of cores that this process may use."""
    every = os.cpu_count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else every


def environment(threads: int) -> dict:
    """Environment of a job, with modules importable from any directory. Keeps the user's
    OMP_NUM_THREADS."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])])
    return {'OMP_NUM_THREADS': str(threads)} | os.environ | {'PYTHONPATH': path}


def run_jobs(jobs: list[Job], devices: list[str], at_once: int = 1) -> dict[str, str]:
    """Run `jobs`, `at_once` of them on each device. A failed job does not stop the others.
    Returns name -> error of the failed ones.

    Ctrl-C, SIGTERM or any exception here terminates the running jobs and waits until they have
    saved their checkpoints.
    """
    waiting, running, errors = deque(jobs), [], {}
    free = devices * at_once
    threads, n_ended = max(1, cores() // len(free)), 0
    console = Console(stderr=True)
    bar = progress.Progress(
        *progress.Progress.get_default_columns(), progress.MofNCompleteColumn(), console=console,
        disable=not console.is_terminal, speed_estimate_period=600)
    task = bar.add_task(f'{len(jobs)} runs, iterations', total=sum(job.iterations for job in jobs))
    plain = dict(highlight=False, markup=False)
    with bar, _sigterm_raises():
        try:
            while waiting or running:
                while waiting and free:
                    job = waiting.popleft()
                    job.device = free.pop(0)
                    console.print(f'{job.name}: starts on {job.device}', **plain)
                    job.start(threads)
                    running.append(job)
                for job in list(running):
                    status = job.process.poll()
                    if status == 0 and job.stage + 1 < len(job.commands):
                        job.stage += 1
                        job.start(threads)
                    elif status is not None:
                        running.remove(job)
                        free.append(job.device)
                        n_ended += 1
                        if error := job.error():
                            errors[job.name] = error
                            console.print(f'{job.name}: failed: {error}', style='red', **plain)
                        else:
                            console.print(f'{job.name}: done ({n_ended} of {len(jobs)})', **plain)
                if not bar.disable:  # it reads the metrics of all jobs
                    bar.update(task, completed=sum(job.iteration() for job in jobs))
                time.sleep(POLL if running else 0)
        finally:
            for job in running:
                job.process.terminate()  # background processes ignore SIGINT
            for job in running:
                job.process.wait()
    return errors


@contextlib.contextmanager
def _sigterm_raises():
    """Make SIGTERM and SIGHUP (closed terminal) raise SystemExit within the block."""
    def leave(number, _):
        raise SystemExit(128 + number)
    numbers = [getattr(signal, name) for name in ('SIGTERM', 'SIGHUP') if hasattr(signal, name)]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
