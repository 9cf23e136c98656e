"""The script of the GPU check without a GPU: its commands are sound, and a failure costs itself."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import configurator

ROOT = Path(__file__).resolve().parents[3]
PARTS = 'smoke exact speed tune train recompute sizes programs ladder'.split()
# in place of Python: what is run says so; one test fails, one process dies
STUB = r'''#!/usr/bin/env bash
case "$*" in
  *gpu_table.py*) exec "$REAL" "$@" ;;
  '-c '*) echo 'Some GPU, torch 2' ;;
  *--collect-only*) printf 'tests/a/test_a.py::test_a[%s]\n' a b c d e f g h i
    echo 'tests/programs/test_gpu.py::test_first' ;;
  *pytest*test_a\[b]*) echo 'CUDA error'; exit 3 ;;
  *pytest*test_first*) echo 'FAILED tests/programs/test_gpu.py::test_first - wrong'; exit 1 ;;
  *bench.py*--mode=train*) file=${*: -1}
    echo '{"mode": "train", "median_ms": 7.5}' > "${file#--save=}" ;;
esac
'''


def check(*args, **env):
    return subprocess.run(['bash', 'lab/scripts/gpu_check.sh', *args], cwd=ROOT, text=True,
                          capture_output=True, env=os.environ | {'PYTHON': sys.executable} | env)


@pytest.mark.parametrize('part', PARTS)
def test_commands_are_sound(part, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = check(f'--part={part}', '--dry_run=True')
    assert done.returncode == 0 and done.stderr == ''
    assert part != 'smoke' or done.stdout.count('-m gpu\\ or') == 6  # else they are left out
    commands = [line.replace('\\', '').split()[1:] for line in done.stdout.splitlines()]
    assert commands
    for program, *args in commands:
        if program == 'bench.py':
            configurator.parse('bench', args, echo=False)
        elif program != '-m':
            assert (ROOT / program).exists()
    if part == 'smoke':
        collect = [sys.executable, '-m', 'pytest', '-q', '--collect-only', '-m', 'gpu', 'tests/gpu']
        found = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True).stdout.split('\n')
        assert len(commands) == 6 and {command[-1] for command in commands} <= set(found)


@pytest.fixture
def stub(tmp_path):
    path = tmp_path / 'python'
    path.write_text(STUB)
    path.chmod(0o755)
    return dict(PYTHON=str(path), REAL=sys.executable)


def test_a_process_that_dies_takes_no_test_along(tmp_path, stub):
    done = check('--part=exact', f'--out={tmp_path}', **stub)
    assert done.returncode == 1
    failed = (tmp_path / 'exact-failed.txt').read_text()
    assert 'FAILED tests/programs/test_gpu.py::test_first - wrong' in failed
    assert len(re.findall(r'failed with status 3: CUDA error', failed)) == 2  # together, then alone
    progress = done.stdout.partition('\nfailed (')[0]
    alone = re.findall(r'exact-0-\d: (\w+)', progress)
    assert alone.count('ok') == 6 and len(alone) == 8
    assert check('--part=train', f'--out={tmp_path}', **stub).returncode == 0
    assert '| 7.5 |' in (tmp_path / 'README.md').read_text()


@pytest.mark.parametrize('args, why', [
    (('--part=all',), 'choose smoke'), (('--part=smoke', '--fast'), '--fast'),
    (('--part=speed', '--device=cpu'), 'needs a CUDA device')])
def test_bad_arguments(args, why, tmp_path):
    done = check(*args, f'--out={tmp_path / "out"}')
    assert done.returncode == 2 and why in done.stderr and not (tmp_path / 'out').exists()
