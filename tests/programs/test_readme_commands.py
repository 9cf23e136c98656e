"""The commands of README's "Start", one after another, in a fresh checkout."""
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.programs.support import ROOT

PREPARED = ROOT / 'data' / 'shakespeare_bpe'
NOT_TRACKED = shutil.ignore_patterns('.git', '.venv*', 'out*', 'runs', '__pycache__', '.*_cache',
                                     '*.egg-info', '.lock')
COMMANDS = ['make demo', 'make test', 'source .venv/bin/activate', 'python sample.py',
            'python sample.py --watch=True', 'python chat.py', 'python -m kv out-mqa-local',
            'python data/text/prepare.py --input=book.txt --tokenizer=bpe:1024',
            'python train.py config/train_rope_mha.py --plans=auto',
            'python sample.py out-rope-mha --kv_budget=128KB']
MESSAGES = [f'What say you to {name} the {n}th, good my lady?'
            for name in ('Henry', 'Edward', 'Louis', 'Charles') for n in range(4, 14)]


@pytest.fixture(scope='module')
def shell(tmp_path_factory):
    """Return a function that runs a command in a fresh checkout with the current environment and
    returns its output; the command must succeed without warnings."""
    checkout = tmp_path_factory.mktemp('fresh') / 'nanokv'
    shutil.copytree(ROOT, checkout, ignore=NOT_TRACKED)
    (checkout / '.venv/bin').mkdir(parents=True)
    python = checkout / '.venv/bin/python'
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (checkout / '.venv/.installed').touch()  # for make
    env = {name: value for name, value in os.environ.items()
           if name not in ('PYTHONPATH', 'OMP_NUM_THREADS')}
    env['PATH'] = f"{python.parent}{os.pathsep}{env['PATH']}"

    def run(command, stdin=''):
        done = subprocess.run(command, shell=True, cwd=checkout, env=env, input=stdin, text=True,
                              capture_output=True)
        message = f'{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}'
        assert done.returncode == 0, message
        assert not re.search('Traceback|Warning|warning:', done.stdout + done.stderr), message
        return done.stdout
    run.checkout = checkout
    return run


def test_these_are_the_commands():
    start = re.search(r'^## Start\n(.*?)^## ', (ROOT / 'README.md').read_text(), re.M | re.S)[1]
    blocks = re.findall(r'^```sh\n(.*?)^```', start, re.M | re.S)
    lines = [line.partition('  #')[0].strip() for block in blocks for line in block.splitlines()]
    assert lines == COMMANDS


@pytest.mark.slow  # five minutes; needs the prepared data set: `make test-slow` prepares it
def test_they_run_one_after_another(shell):
    assert PREPARED.joinpath('train.bin').is_file()

    out = shell('make demo')
    assert 'step 800: ' in out and out.count('-' * 15) == 2
    assert '32.0x smaller than vanilla float32' in out

    out = shell('python sample.py')
    assert out.startswith('Using out-mqa-local, the newest run here\n')
    assert out.count('-' * 15) == 10 and 'smaller than vanilla' in out

    assert '32.0x smaller than vanilla bfloat16' in shell('python -m kv out-mqa-local')

    out = shell('python chat.py', '\n'.join([*MESSAGES, '/stats']))
    reused = float(out.rpartition(' prompt tokens reused (')[2].partition('%')[0])
    assert '40 replies: ' in out and reused > 90
    again = shell('python chat.py', '/history')
    assert 'going on with 80 turns' in again
    history = again.partition('/help lists')[2]
    assert all(f'ROMEO.\n{message}\n\nJULIET.\n' in history for message in MESSAGES)

    (shell.checkout / 'book.txt').write_text((ROOT / 'README.md').read_text() * 3)
    *_, prepare, train, sample = COMMANDS
    line = shell(prepare).splitlines()[-1]
    command = line[line.index('python train.py config/train_text.py'):]
    few = '--max_iters=20 --eval_interval=10 --eval_iters=2'
    shell(f'{command} {few}')
    assert 'Using out-text, the newest run here (others: out-mqa-local)\n' in shell(
        'python sample.py --num_samples=1 --max_new_tokens=50')

    assert len(re.findall('smaller  val loss', shell(f'{train} {few}'))) == 3 * 7
    assert 'KV plan within 128 kB' in shell(sample)
