"""Tests in a worker process of `scripts.gpu.supervise`: each is a cell. `python -m scripts.gpu.run_tests --fd=N id id ...`"""
import os
import subprocess
import sys
import time

import pytest

from scripts.gpu.supervise import ROOT, worker_cells

FIRST = 'tests/programs/'  # whole programs tell most


def collect(marker: str = 'gpu', folder: str = 'tests') -> list[str]:
    """Ids of the tests with this mark, the most telling first.

    Raises:
        RuntimeError: pytest could not collect them; has its words.
    """
    done = subprocess.run([sys.executable, '-m', 'pytest', folder, '--collect-only', '-q', '-m', marker], cwd=ROOT,
                          capture_output=True, text=True, stdin=subprocess.DEVNULL)
    ids = [line.strip() for line in done.stdout.splitlines() if '::' in line]
    if done.returncode not in (0, 5):
        raise RuntimeError(f'pytest could not collect the tests: {(done.stdout + done.stderr)[-1500:]}')
    return sorted(ids, key=lambda name: not name.startswith(FIRST))


class Recorder:
    """A pytest plugin. After a failure it asks the device for an answer: where there is none, all later tests of this process
    would fail too, so the process ends, and they go to another."""

    def __init__(self, emit):
        self.emit, self.outcome, self.why, self.start = emit, '', '', 0.0

    def pytest_runtest_logstart(self, nodeid, location):
        self.outcome, self.why, self.start = '', '', time.monotonic()
        self.emit(begin=nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.outcome, self.why = 'failed', f'{report.when}: {report.longreprtext[-1500:]}'
        elif report.skipped and not self.outcome:
            self.outcome, self.why = 'skipped', str(report.longrepr)[-200:]

    def pytest_runtest_logfinish(self, nodeid, location):
        more = {'why': self.why} if self.why else {}
        self.emit(cell=nodeid, status=self.outcome or 'ok', seconds=time.monotonic() - self.start, **more)
        if self.outcome == 'failed' and poisoned():
            sys.stdout.flush()
            os._exit(3)


def poisoned() -> bool:
    """Whether CUDA refuses all further work in this process."""
    import torch
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        return False
    except Exception:
        return True


def main(argv=None):
    _, names, emit = worker_cells(argv)
    recorder = Recorder(emit)
    # cells do not share what they compiled: a process runs few tests, and Triton's cache on disk is shared
    raise SystemExit(pytest.main([*names, '-q', '--tb=short', '-p', 'no:cacheprovider'], plugins=[recorder]))


if __name__ == '__main__':
    main()
