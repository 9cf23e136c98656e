"""The first commands of a new user: each ends with the next command, or says what is missing."""
import os
import subprocess
import sys

import pytest

import train
from config import missing
from config.errors import UserError
from data.text import prepare
from tests.programs.support import ROOT, VANILLA, flags, metrics, run_train


def test_train_alone_names_the_config_to_begin_with(tmp_path):
    message = "'openwebtext', is not prepared .*: python train.py config/train_mqa_local.py$"
    with pytest.raises(UserError, match=message):
        train.main([f"--out_dir={tmp_path / 'out'}"])
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('n_characters, block_size', [(5200, 256), (2000, 128), (40, 2)])
def test_own_text_and_the_command_that_trains_on_it(tmp_path, monkeypatch, capsys, n_characters,
                                                    block_size):
    (tmp_path / 'a.txt').write_text(('some words and more words\n' * 200)[:n_characters])
    monkeypatch.setattr(prepare, 'DATA_ROOT', tmp_path / 'data')
    prepare.main(['--input', str(tmp_path / 'a.txt'), '--name', 'mine'])
    last = capsys.readouterr().out.splitlines()[-1]
    command = ': python train.py config/train_text.py --dataset=mine --out_dir=out-mine'
    if block_size < 256:
        command += f' --block_size={block_size}'
    assert last.endswith(command) and (block_size < 256) == ('a larger --val also helps' in last)
    monkeypatch.setattr(train, 'DATA_ROOT', tmp_path / 'data')
    monkeypatch.chdir(tmp_path)
    small = dict(max_iters=1, eval_interval=1, eval_iters=1, batch_size=1, device='cpu')
    train.main(command.split()[3:] + flags(small))
    assert (tmp_path / 'out-mine' / 'ckpt.pt').exists()


@pytest.mark.parametrize('max_iters', [20, 10])
def test_a_finished_run_has_nothing_to_do(tmp_path, capsys, max_iters):
    run_train(tmp_path, VANILLA)
    before = (tmp_path / 'ckpt.pt').read_bytes(), metrics(tmp_path)
    capsys.readouterr()
    run_train(tmp_path, VANILLA, init_from='resume', max_iters=max_iters)
    out = capsys.readouterr().out
    assert f'nothing to do: {tmp_path}/ckpt.pt is of iteration 20 of max_iters={max_iters}' in out
    assert 'iter ' not in out
    assert ((tmp_path / 'ckpt.pt').read_bytes(), metrics(tmp_path)) == before


BARE = [sys.executable, '-S', '-E']  # without site-packages, and without PYTHONPATH


@pytest.mark.parametrize('program', [
    *(f'{name}.py' for name in ('sample', 'chat', 'serve', 'train', 'bench', 'ablate')),
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob('data/*/prepare.py')),
    *(f'-m {name}' for name in (
        'kv', 'interop.evaluate', 'interop.export', 'interop.convert', 'interop.import_hf',
        'training.memory', 'training.plot', 'training.shards'))])
def test_a_python_without_the_packages_is_one_line(program):
    done = subprocess.run([*BARE, *program.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count('\n') == 1
    assert done.stderr.startswith(f'error: this Python ({sys.executable}) has no ')
    assert done.stderr.endswith(' -m pip install -e . (or make demo)\n')


def test_the_environment_is_named_where_there_is_one(tmp_path, monkeypatch, capsys):
    (tmp_path / '.venv/bin').mkdir(parents=True)
    (tmp_path / '.venv/bin/activate').touch()
    monkeypatch.setattr(missing, 'ROOT', tmp_path)
    monkeypatch.chdir(tmp_path)
    missing.excepthook(ModuleNotFoundError, ModuleNotFoundError(name='rich'), None)
    activate = os.path.join('.venv', 'bin', 'activate')
    message = capsys.readouterr().err
    assert f'has no rich: activate the environment (source {activate}) or install with' in message


def test_other_missing_modules_keep_their_traceback(capsys):
    error = ModuleNotFoundError("No module named 'pandas'", name='pandas')
    missing.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "ModuleNotFoundError: No module named 'pandas'\n"
