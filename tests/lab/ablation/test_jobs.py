"""Parallel jobs: a failure stops no other job, Ctrl-C makes all of them stop."""
import time
from types import SimpleNamespace

import pytest

from lab.ablation.jobs import Job, run_jobs

STOPS_IN_ORDER = '''
import pathlib, signal, sys, time
def stop(*_):
    pathlib.Path(sys.argv[1], 'stopped').touch()
    sys.exit()
signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1], 'started').touch()
time.sleep(60)
'''


@pytest.fixture
def job(tmp_path):
    def make(name, *codes, device=True):
        out = tmp_path / name
        head = 'import sys; assert sys.argv[-1] == "--device=cpu"\n' if device else ''
        return Job(name, [['-c', head + code, str(out)] for code in codes], out, 10)
    return make


def touch(name):
    return f'import pathlib, sys; pathlib.Path(sys.argv[1], {name!r}).touch()'


def test_commands_follow_one_another_and_a_failure_stops_nothing_else(job, tmp_path, capfd):
    after_one = 'assert (__import__("pathlib").Path(sys.argv[1]) / "one").exists(); '
    jobs = [job('good', touch('one'), after_one + touch('two')),
            job('bad', 'print("so far"); sys.exit("error: no such thing")', touch('never')),
            job('silent', 'import os; os._exit(3)'),
            job('last', touch('one'))]
    assert run_jobs(jobs, ['cpu'], 2) == {'bad': 'no such thing', 'silent': 'status 3'}
    assert (tmp_path / 'good/two').exists() and (tmp_path / 'last/one').exists()
    assert not (tmp_path / 'bad/never').exists()
    assert 'so far' in (tmp_path / 'bad/train.log').read_text()
    told = capfd.readouterr().err
    assert 'bad: failed: no such thing' in told and 'last: done' in told and '4 of 4' in told


def test_as_many_at_once_as_asked_for_on_each_device(job, tmp_path):
    code = ('import time, sys, pathlib; a = time.time(); time.sleep(1.5); '
            'pathlib.Path(sys.argv[1], "t").write_text(f"{a} {time.time()}")')
    jobs = [job(str(k), code, device=False) for k in range(4)]
    run_jobs(jobs, ['cpu', 'cpu'], 1)
    spans = [tuple(map(float, (tmp_path / str(k) / 't').read_text().split())) for k in range(4)]
    most = max(sum(a < end and b > start for a, b in spans) for start, end in spans)
    together = [sum(a <= t < b for a, b in spans) for t, _ in spans]
    assert max(together) == 2 and most >= 2
    assert {job.device for job in jobs} == {'cpu'}


def test_what_ends_the_program_lets_the_running_ones_stop_first(job, tmp_path, monkeypatch):
    def interrupted(seconds):
        if (tmp_path / 'long/started').exists():
            raise KeyboardInterrupt
        time.sleep(seconds)
    jobs = [job('long', STOPS_IN_ORDER, device=False), job('waiting', touch('one'))]
    monkeypatch.setattr('lab.ablation.jobs.time', SimpleNamespace(sleep=interrupted))
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, ['cpu'])
    assert (tmp_path / 'long/stopped').exists() and jobs[0].process.poll() == 0
    assert not (tmp_path / 'waiting').exists()
