"""What a newcomer's first commands say: where to begin, what to run next, that there is nothing left to do."""
import os
import subprocess
import sys

import pytest

import train
from config import missing
from config.errors import UserError
from data.text import prepare
from tests.programs.support import ROOT, VANILLA, flags, metrics, run_train


def test_train_alone_names_the_config_to_begin_with(tmp_path, data_root, monkeypatch):
    monkeypatch.setattr(train, 'DATA_ROOT', data_root)
    with pytest.raises(UserError, match="'openwebtext', is not prepared .*: python train.py config/train_mqa_local.py$"):
        train.main([f"--out_dir={tmp_path / 'out'}"])
    assert not (tmp_path / 'out').exists()


def test_own_data_end_with_a_command_of_a_size_for_a_laptop(tmp_path, monkeypatch, capsys):
    (tmp_path / 'a.txt').write_text('some words and more words\n' * 200)
    monkeypatch.setattr(prepare, 'DATA_ROOT', tmp_path / 'data')
    prepare.main(['--input', str(tmp_path / 'a.txt'), '--name', 'mine'])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(': python train.py config/train_text.py --dataset=mine --out_dir=out-mine')
    monkeypatch.setattr(train, 'DATA_ROOT', tmp_path / 'data')
    monkeypatch.chdir(tmp_path)
    argv = last.partition('python train.py ')[2].split()
    train.main([*argv, '--max_iters=2', '--eval_interval=2', '--eval_iters=1', '--block_size=32', '--device=cpu'])
    assert (tmp_path / 'out-mine' / 'ckpt.pt').exists()


@pytest.mark.parametrize('max_iters', [20, 10])
def test_a_finished_run_says_that_there_is_nothing_to_do(tmp_path, data_root, capsys, max_iters):
    run_train(tmp_path, VANILLA)
    before = (tmp_path / 'ckpt.pt').read_bytes(), metrics(tmp_path)
    capsys.readouterr()
    run_train(tmp_path, VANILLA, init_from='resume', max_iters=max_iters)
    out = capsys.readouterr().out
    assert f'nothing to do: {tmp_path}/ckpt.pt is of iteration 20 of max_iters={max_iters}; to go on, raise' in out
    assert 'iter ' not in out and ((tmp_path / 'ckpt.pt').read_bytes(), metrics(tmp_path)) == before
    run_train(tmp_path, VANILLA, init_from='resume', max_iters=22)
    assert metrics(tmp_path)[-1]['iter'] == 22


def test_default_accumulation_is_told_on_a_cpu(tmp_path, data_root, capsys):
    settings = {name: value for name, value in VANILLA.items() if name != 'gradient_accumulation_steps'}
    train.main(flags(settings | dict(out_dir=tmp_path, max_iters=1)))
    assert 'Note: that is 40 micro-batches of 4 x 16 tokens; on a CPU fewer may do' in capsys.readouterr().out
    run_train(tmp_path / 'given', VANILLA, max_iters=1)
    assert 'micro-batches' not in capsys.readouterr().out


BARE = [sys.executable, '-S', '-E']  # without site-packages, and without PYTHONPATH


def test_the_bare_interpreter_of_these_tests_is_bare():
    code = 'from importlib.util import find_spec as f; print([f("torch"), f("numpy"), f("rich")])'
    assert subprocess.check_output([*BARE, '-c', code], text=True) == '[None, None, None]\n'


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
