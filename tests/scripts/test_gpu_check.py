"""The GPU check, as far as a machine without one can tell: its commands are understood, its time limit and its page."""
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import configurator
from scripts import gpu_check

ROOT = Path(gpu_check.ROOT)


@pytest.fixture
def in_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize('args', [args for part in gpu_check.BENCH.values() for args in part.values()])
def test_bench_understands_its_commands(args, in_checkout):
    s = configurator.parse('bench', shlex.split(args) + ['--device=cuda', '--json=True'], echo=False)
    assert s.mode in ('train', 'kernels', 'decode', 'serve', 'prefill', 'recompute', 'lengths')


@pytest.mark.parametrize('stack', ['', gpu_check.STACK])
def test_train_understands_its_commands(stack, in_checkout):
    s = configurator.parse('train', shlex.split(f'{gpu_check.RECALL} {stack} --dtype=float16'), echo=False)
    assert s.dataset == 'recall' and s.max_iters == 60


def test_a_command_that_fails_and_one_that_has_no_time(tmp_path, capsys):
    part = gpu_check.Part('tests', tmp_path, limit=60)
    assert part.run('good', '-c', 'print("fine")')
    assert not part.run('bad', '-c', 'raise SystemExit("out of luck")')
    assert 'out of luck' in capsys.readouterr().out
    part.end -= 55
    assert not part.run('late', '-c', 'pass')
    assert part.done == {'good': 'ok', 'bad': 'failed with status 1', 'late': 'not run: the time was up'}
    assert 'fine' in (tmp_path / 'tests.log').read_text()


def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, 'LEAST', 0.1)
    monkeypatch.setattr(gpu_check, 'GRACE', 5)
    part = gpu_check.Part('tests', tmp_path, limit=3)
    program = ('import subprocess, sys, time; p = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]); '
               'print(p.pid, flush=True); time.sleep(60)')
    assert not part.run('endless', '-c', program)
    assert part.done['endless'].startswith('stopped after 3 s')
    child = int((tmp_path / 'tests.log').read_text().splitlines()[2])
    for _ in range(50):
        if not Path(f'/proc/{child}').exists() or 'zombie' in Path(f'/proc/{child}/status').read_text():
            return
        time.sleep(0.1)
    raise AssertionError('its child still runs')


def test_the_page(tmp_path):
    cell = {'context': 8192, 'batch': 256, 'sides': {
        'kernel, int8': {'ms': {'median': 0.1, 'min': 0.09, 'max': 0.2}, 'bytes': 10 ** 8, 'bytes_per_second': 1e12,
                         'share': 0.8, 'error': 1e-3}, 'FlexAttention': {'failed': 'RuntimeError: no'}}}
    facts = {'command': 'python bench.py', 'device': 'a GPU', 'processor': 'p', 'threads': 1, 'torch': '2', 'dtype': 'bfloat16',
             'against': '', 'repeats': 5, 'models': {}}
    training = {'context': 8192, 'sides': {'flex, W=512': {'forward_ms': cell['sides']['kernel, int8']['ms'],
                                                           'ms': cell['sides']['kernel, int8']['ms']}}}
    kernels = facts | {'mode': 'kernels', 'heads': [12, 1, 64], 'window_size': 512, 'decode': [cell], 'training': [training],
                       'rates': {'copy_bytes_per_second': 4e12, 'product_flops': 7e14}, 'write': []}
    short = {'runs': {'full-bfloat16-none': {'losses': [4.2, 2.5], 'skipped': 0, 'memory_peak_bytes': 5e8}}}
    train = facts | {'mode': 'train', 'compile': True, 'tokens_per_second': 3e5, 'model_tflops_per_second': 250.0,
                     'median_ms': 55.0, 'batch_size': 16, 'block_size': 1024}
    for name, document in {'kernels-mqa': kernels, 'train-short': short, 'train-vanilla-1024': train,
                           'tests': {'counts': {'passed': 7, 'skipped': 1}}}.items():
        (tmp_path / f'{name}.json').write_text(json.dumps(document))
    page = gpu_check.page(tmp_path)
    assert "| 8,192 | 256 | kernel, int8 | 100.0 (90.0-200.0) | 1,000 | 80 | 1e-03 |" in page
    assert 'RuntimeError: no' in page and '| full-bfloat16-none | 4.200 | 2.500 | 0 | 500 |' in page
    assert '300,000 tokens/s' in page and '7 passed, 1 skipped' in page


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is one')
def test_without_a_gpu(tmp_path):
    done = subprocess.run([sys.executable, 'scripts/gpu_check.py', '--part=tests', f'--out={tmp_path}'], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 2 and 'no CUDA device' in done.stderr
    assert gpu_check.main(['--list']) == 0
