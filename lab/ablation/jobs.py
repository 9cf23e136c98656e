"""Run several training jobs at once, each in its own processes that can be stopped and resumed."""
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.files import regular_only
from lab.ablation.results import ROOT

POLL = 0.5  # seconds


@dataclass
class Job:
    """Commands (argument lists for this Python) run one after another on one device. All output
    goes to train.log in out_dir."""
    name: str
    commands: list[list[str]]
    out_dir: Path
    device: str = ''
    process: subprocess.Popen | None = field(default=None, repr=False)
    stage: int = 0  # index of the running command
    log_start: int = 0  # where its output begins in train.log

    def start(self, threads: int) -> None:
        """Start the current command in its own session, so that Ctrl-C does not reach it too. The
        user's OMP_NUM_THREADS, if set, replaces `threads`."""
        self.out_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, *self.commands[self.stage], f'--device={self.device}']
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
        environment = {'OMP_NUM_THREADS': str(threads)} | os.environ | {'PYTHONPATH': path}
        with open(self.out_dir / 'train.log', 'a', opener=regular_only) as log:
            self.log_start = log.tell()
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True, env=environment)

    def error(self) -> str:
        """The error of a command that has ended: '' for status 0, otherwise the last line of its
        output or the signal that killed it."""
        status = self.process.returncode
        if status == 0:
            return ''
        if status < 0:
            return f'killed by {signal.Signals(-status).name}'
        output = (self.out_dir / 'train.log').read_bytes()[self.log_start:]
        lines = output.decode(errors='replace').strip().splitlines()
        return lines[-1].strip().removeprefix('error: ') if lines else f'status {status}'


def run_jobs(jobs: list[Job], devices: list[str], at_once: int = 1) -> dict[str, str]:
    """Run `jobs`, `at_once` of them on each device. A failed job does not stop the others.
    Returns name -> error of the failed ones.

    Ctrl-C, SIGTERM or any exception here terminates the running jobs and waits until they have
    saved their checkpoints.
    """
    waiting, running, errors = deque(jobs), [], {}
    free = devices * at_once
    threads = max(1, torch.get_num_threads() // len(free))
    for name in ('SIGTERM', 'SIGHUP'):  # SIGHUP: the terminal was closed; not on Windows
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, _: sys.exit(128 + number))
    try:
        while waiting or running:
            while waiting and free:
                job = waiting.popleft()
                job.device = free.pop(0)
                print(f'{job.name}: starts on {job.device}, {len(waiting)} more wait',
                      file=sys.stderr, flush=True)
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
                    if error := job.error():
                        errors[job.name] = error
                    print(f'{job.name}: failed: {error}' if error else f'{job.name}: done',
                          file=sys.stderr, flush=True)
            time.sleep(POLL if running else 0)
    finally:
        for job in running:
            job.process.terminate()  # background processes ignore SIGINT
        for job in running:
            job.process.wait()
    return errors
