"""Tests in a worker process of `scripts.gpu.supervise`: each is a cell. `python -m scripts.gpu.run_tests --fd=N id id ...`"""
import os
import subprocess
import sys
import time

from scripts.gpu.supervise import ROOT, context_is_poisoned, worker_cells

FIRST = 'tests/programs/'  # whole programs tell most


def collect(marker: str = 'gpu', folder: str = 'tests') -> tuple[list[str], str]:
    """Ids of the tests with this mark, the most telling first; and pytest's words where other files could not be collected, for
    want of a package."""
    done = subprocess.run([sys.executable, '-m', 'pytest', folder, '--collect-only', '-q', '-m', marker], cwd=ROOT,
                          capture_output=True, text=True, stdin=subprocess.DEVNULL)
    ids = [line.strip() for line in done.stdout.splitlines() if '::' in line and not line.startswith(('ERROR', 'E  ', ' '))]
    failed = done.returncode not in (0, 5)
    return (sorted(ids, key=lambda name: not name.startswith(FIRST)),
            '\n'.join((done.stdout + done.stderr).splitlines()[-30:]) if failed else '')


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
        if self.outcome == 'failed' and context_is_poisoned():
            sys.stdout.flush()
            os._exit(3)


def main(argv=None):
    import pytest
    _, names, emit = worker_cells(argv)
    recorder = Recorder(emit)
    # cells do not share what they compiled: a process runs few tests, and Triton's cache on disk is shared
    raise SystemExit(pytest.main([*names, '-q', '--tb=short', '-p', 'no:cacheprovider'], plugins=[recorder]))


if __name__ == '__main__':
    main()
