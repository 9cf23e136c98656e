"""Tests in a worker process of `lab.scripts.gpu.supervise`, each test a cell:

    python -m lab.scripts.gpu.run_tests --fd=N id id ...
"""
import os
import subprocess
import sys
import time

from lab.scripts.gpu.supervise import ROOT, context_is_poisoned, worker_cells

FIRST = 'tests/programs/'  # tests of whole programs are the most informative


def collect(marker: str = 'gpu', folder: str = 'tests') -> tuple[list[str], str]:
    """(ids of the tests with this mark, the most informative first; the end of pytest's output if a
    file could not be collected, for example because a package is missing, else '')."""
    command = [sys.executable, '-m', 'pytest', folder, '--collect-only', '-q', '-m', marker]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL)
    lines = done.stdout.splitlines()
    ids = [line.strip() for line in lines
           if '::' in line and not line.startswith(('ERROR', 'E  ', ' '))]
    ids.sort(key=lambda name: not name.startswith(FIRST))
    if done.returncode in (0, 5):
        return ids, ''
    return ids, '\n'.join((done.stdout + done.stderr).splitlines()[-30:])


class Recorder:
    """A pytest plugin that reports each test as a cell.

    After a failure it asks the device for an answer. If the device gives none, every later test of
    this process would fail too, so the process ends and those tests go to another.
    """

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
        seconds = time.monotonic() - self.start
        self.emit(cell=nodeid, status=self.outcome or 'ok', seconds=seconds, **more)
        if self.outcome == 'failed' and context_is_poisoned():
            sys.stdout.flush()
            os._exit(3)


def main(argv=None):
    import pytest
    _, names, emit = worker_cells(argv)
    recorder = Recorder(emit)
    # processes share compiled kernels through Triton's cache on disk alone: each runs few tests
    raise SystemExit(pytest.main([*names, '-q', '--tb=short', '-p', 'no:cacheprovider'],
                                 plugins=[recorder]))


if __name__ == '__main__':
    main()
