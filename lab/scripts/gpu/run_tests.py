"""Run tests in a worker process of `lab.scripts.gpu.supervise`, each test as a cell:

    python -m lab.scripts.gpu.run_tests --fd=N id id ...
"""
import subprocess
import sys
import time

from lab.scripts.gpu.supervise import ROOT, end_if_poisoned, worker_cells

FIRST = 'tests/programs/'  # tests of whole programs are the most informative


def collect() -> tuple[list[str], str]:
    """Return (ids of the tests marked gpu, the most informative first; the end of pytest's output
    if a file could not be collected, for example without a package, otherwise '')."""
    command = [sys.executable, '-m', 'pytest', 'tests', '--collect-only', '-q', '-m', 'gpu']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL)
    ids = [line.strip() for line in done.stdout.splitlines()
           if '::' in line and not line.startswith(('ERROR', 'E  ', ' '))]
    ids.sort(key=lambda name: not name.startswith(FIRST))
    failed = done.returncode not in (0, 5)
    return ids, '\n'.join((done.stdout + done.stderr).splitlines()[-30:]) if failed else ''


class Recorder:
    """A pytest plugin that reports each test as a cell."""

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
        if self.outcome == 'failed':
            end_if_poisoned()


if __name__ == '__main__':
    import pytest
    _, names, emit = worker_cells()
    options = [*names, '-q', '--tb=short', '-p', 'no:cacheprovider']
    raise SystemExit(pytest.main(options, plugins=[Recorder(emit)]))
