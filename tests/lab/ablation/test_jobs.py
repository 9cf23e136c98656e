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
    def make(name, *codes):
        out = tmp_path / name
        head = 'import sys; assert sys.argv[-1] == "--device=cpu"\n'
        return Job(name, [['-c', head + code, str(out)] for code in codes], out)
    return make


def touch(name):
    return f'import pathlib, sys; pathlib.Path(sys.argv[1], {name!r}).touch()'


@pytest.mark.parametrize('devices, at_once', [(['cpu'], 2), (['cpu', 'cpu'], 1)])
def test_two_run_at_once_and_a_failure_stops_nothing_else(job, tmp_path, capfd, devices, at_once):
    waits = ('import pathlib, time\nwhile not (pathlib.Path(sys.argv[1]).parent / {!r}).exists():'
             ' time.sleep(0.02)\n')
    jobs = [job('good', touch('one'), waits.format('last/one') + touch('two')),
            job('bad', 'print("so far"); sys.exit("error: no such thing")', touch('never')),
            job('silent', 'import os; os._exit(3)'),
            job('last', waits.format('good/one') + touch('one'))]
    assert run_jobs(jobs, devices, at_once) == {'bad': 'no such thing', 'silent': 'status 3'}
    assert (tmp_path / 'good/two').exists() and (tmp_path / 'last/one').exists()
    assert not (tmp_path / 'bad/never').exists()
    assert 'so far' in (tmp_path / 'bad/train.log').read_text()
    told = capfd.readouterr().err
    assert told.index('bad: failed: no such thing') < told.index('silent: starts')  # two, not more


def test_what_ends_the_program_lets_the_running_ones_stop_first(job, tmp_path, monkeypatch):
    def interrupted(seconds):
        if (tmp_path / 'long/started').exists():
            raise KeyboardInterrupt
        time.sleep(seconds)
    jobs = [job('long', STOPS_IN_ORDER), job('waiting', touch('one'))]
    monkeypatch.setattr('lab.ablation.jobs.time', SimpleNamespace(sleep=interrupted))
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, ['cpu'])
    assert (tmp_path / 'long/stopped').exists() and jobs[0].process.poll() == 0
    assert not (tmp_path / 'waiting').exists()
