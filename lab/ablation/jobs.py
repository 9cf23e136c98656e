"""Runs that train at the same time, each a process of its own that can be stopped and gone on with."""
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from training.log import read_metrics

ROOT = Path(__file__).resolve().parents[2]
POLL = 0.5  # seconds


@dataclass
class Job:
    """Commands that follow one another, on one device: one of them trains, the last may measure.

    name: shown while it runs. commands: argument lists, for this Python. out_dir: of the training, whose metrics.jsonl tells
    how far it is, and whose train.log gets the output. iterations: until it is trained.
    """
    name: str
    commands: list[list[str]]
    out_dir: Path
    iterations: int
    device: str = ''
    process: subprocess.Popen | None = field(default=None, repr=False)
    stage: int = 0
    said: int = 0  # where in train.log the running command's output begins

    def start(self, threads: int) -> None:
        """In a session of its own, so that Ctrl-C reaches it once, from here."""
        self.out_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, *self.commands[self.stage]]
        command += [f'--device={self.device}'] * bool(self.device)
        with open(self.out_dir / 'train.log', 'a') as log:
            self.said = log.tell()
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                            start_new_session=True, env=environment(threads))

    def iteration(self) -> int:
        """The last one that was logged."""
        rows = read_metrics(self.out_dir / 'metrics.jsonl')
        return rows[-1]['iter'] if rows else 0

    def what_went_wrong(self) -> str:
        """Of a command that ended: '' if nothing did, else the last line of its output, or the signal that killed it."""
        status = self.process.returncode
        if status == 0:
            return ''
        if status < 0:
            name = signal.Signals(-status).name
            return f'killed by {name}' + ' (was there too little memory?)' * (name == 'SIGKILL')
        lines = (self.out_dir / 'train.log').read_bytes()[self.said:].decode(errors='replace').splitlines()
        return next((line.strip().removeprefix('error: ') for line in reversed(lines) if line.strip()), f'status {status}')


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def environment(threads: int) -> dict:
    """Of a job: modules are found wherever it is started from. A number of threads that the user has set stays."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])])
    return {'OMP_NUM_THREADS': str(threads)} | os.environ | {'PYTHONPATH': path}


def run_jobs(jobs: list[Job], devices: list[str], at_once: int = 1, on_end=lambda job, error: None) -> None:
    """Run `jobs`, `at_once` on each device; one that fails does not keep the others from running.

    Ctrl-C, SIGTERM, or anything else that ends this, lets the running ones save where they stand first.

    on_end: called with each job that is done, and what went wrong ('' = nothing), in this thread.
    """
    waiting, running = deque(jobs), []
    free = [device for _ in range(at_once) for device in devices]
    threads = max(1, cores() // len(free))
    with _Bars(jobs) as bars, _sigterm_raises():
        try:
            while waiting or running:
                while waiting and free:
                    job = waiting.popleft()
                    job.device = free.pop(0)
                    job.start(threads)
                    running.append(job)
                    bars.started(job)
                for job in list(running):
                    bars.update(job)
                    status = job.process.poll()
                    if status is None:
                        continue
                    if status == 0 and job.stage + 1 < len(job.commands):
                        job.stage += 1
                        job.start(threads)
                        continue
                    running.remove(job)
                    free.append(job.device)
                    error = job.what_went_wrong()
                    bars.ended(job, error)
                    on_end(job, error)
                time.sleep(POLL if running else 0)
        finally:  # nothing is running here unless something went wrong, or Ctrl-C was pressed
            for job in running:
                job.process.terminate()  # not SIGINT, which programs ignore that were started in the background
            for job in running:
                job.process.wait()


@contextlib.contextmanager
def _sigterm_raises():
    """SIGTERM and SIGHUP, like Ctrl-C, leave by way of an exception."""
    def leave(number, _):
        raise SystemExit(128 + number)
    which = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, 'SIGHUP') else [])]  # the latter: its terminal was closed
    before = {number: signal.signal(number, leave) for number in which}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Bars:
    """A bar for all jobs together and one for each that runs; without a terminal, a line for each that starts or ends."""

    def __init__(self, jobs):
        self.console = Console(stderr=True)
        self.quiet = not self.console.is_terminal
        self.progress = Progress(TextColumn('{task.description:40.40}', markup=False), BarColumn(),
                                 MofNCompleteColumn(), TimeElapsedColumn(),
                                 TextColumn('ETA'), TimeRemainingColumn(elapsed_when_finished=True), console=self.console,
                                 disable=self.quiet, speed_estimate_period=600)
        done = sum(min(job.iteration(), job.iterations) for job in jobs)
        self.all = self.progress.add_task(f'all {len(jobs)} runs, iterations', completed=done,
                                          total=sum(job.iterations for job in jobs))
        self.tasks, self.seen = {}, {id(job): min(job.iteration(), job.iterations) for job in jobs}
        self.n_ended, self.n_jobs = 0, len(jobs)

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, *_):
        self.progress.stop()

    def started(self, job):
        at = f' on {job.device}' if job.device else ''
        if self.quiet:
            self.console.print(f'{job.name}{at}: starts' + (f' at iteration {self.seen[id(job)]}' * bool(self.seen[id(job)])),
                               highlight=False, markup=False)
        self.tasks[id(job)] = self.progress.add_task(f'  {job.name}{at}', total=job.iterations, completed=self.seen[id(job)])

    def update(self, job):
        done = min(job.iteration(), job.iterations)
        self.progress.update(self.tasks[id(job)], completed=done,
                             description=f'  {job.name}' + ': measuring' * (0 < job.stage == len(job.commands) - 1))
        self.progress.advance(self.all, done - self.seen[id(job)])
        self.seen[id(job)] = done

    def ended(self, job, error):
        self.n_ended += 1
        self.progress.remove_task(self.tasks[id(job)])
        self.progress.advance(self.all, job.iterations - self.seen[id(job)])
        self.console.print(f'{job.name}: ' + (f'failed: {error}' if error else f'done ({self.n_ended} of {self.n_jobs})'),
                           style='red' if error else None, highlight=False, markup=False)
