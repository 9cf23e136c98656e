"""The script of the GPU check without a GPU: its commands are sound."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bench
import configurator

ROOT = Path(__file__).resolve().parents[3]
PARTS = 'smoke exact speed tune train recompute sizes programs ladder'.split()
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
            configurator.parse(bench.Settings, args, echo=False)
        elif program != '-m':
            assert (ROOT / program).exists()
    if part == 'smoke':
        collect = [sys.executable, '-m', 'pytest', '-q', '--collect-only', '-m', 'gpu', 'tests/gpu']
        found = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True).stdout.split('\n')
        assert len(commands) == 6 and {command[-1] for command in commands} <= set(found)
