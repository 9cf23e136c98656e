"""Programs that read a checkpoint find it: the newest run of this folder, or that of a folder which
is given."""
import os

import pytest

import chat
import configurator
import sample
import serve
from config.errors import UserError
from tests.programs.support import VANILLA, flags, run_train

FEW = flags(dict(num_samples=1, max_new_tokens=4, device='cpu', report=False))


@pytest.fixture
def runs(tmp_path, data_root, monkeypatch):
    """Two runs, the older one saved last but dated back; and folders that are none."""
    monkeypatch.chdir(tmp_path)
    for k, name in enumerate(('out-new', 'out-old')):
        run_train(name, VANILLA, max_iters=10)
        os.utime(f'{name}/ckpt.pt', (1e9 - k, 1e9 - k))
    (tmp_path / 'out-empty').mkdir()
    return tmp_path


def test_without_arguments_the_newest_run_is_taken_and_named(runs, capsys):
    sample.main(FEW)
    assert 'Using out-new, the newest run here (others: out-old)\n' in capsys.readouterr().out
    (runs / 'out-old' / 'ckpt.pt').unlink()
    sample.main(FEW)
    assert 'Using out-new, the newest run here\n' in capsys.readouterr().out


def test_a_run_in_the_default_folder_is_taken_first_and_without_a_word(runs, capsys):
    (runs / 'out-old').rename(runs / 'out')
    sample.main(FEW)
    assert 'newest' not in capsys.readouterr().out


def test_what_was_given_is_not_guessed_at(runs):
    with pytest.raises(UserError, match='out-empty/ckpt.pt'):
        sample.main(['--out_dir=out-empty', *FEW])
    for name in ('out-new', 'out-old'):
        (runs / name / 'ckpt.pt').unlink()
    with pytest.raises(UserError, match=r'no out/ckpt.pt, and no out\*/ckpt.pt in this folder'):
        sample.main(FEW)


@pytest.mark.parametrize('program', [sample, chat, serve])
def test_a_folder_is_accepted(program, runs, monkeypatch):
    asked = []
    monkeypatch.setattr(program, 'load', lambda s: asked.append(s.out_dir) or 1 / 0)
    for argv in (['out-old'], ['--seed=1', 'out-old/'], ['--out_dir=x', 'out-old']):
        with pytest.raises(ZeroDivisionError):
            program.main([*argv, *(['--port=0'] if program is serve else [])])
    assert [name.rstrip('/') for name in asked] == ['out-old'] * 3


def test_a_folder_that_is_none_is_answered_with_those_there_are(runs):
    with pytest.raises(UserError,
                       match="^folder of a run 'out-od' not found, did you mean out-old\\?$"):
        sample.main(['out-od'])
    with pytest.raises(UserError,
                       match="^folder of a run 'x' not found; there are out-new, out-old$"):
        sample.main(['x'])


def test_chat_and_serve_take_the_newest_too(runs, monkeypatch, capsys):
    monkeypatch.setattr('builtins.input', lambda prompt='': (_ for _ in ()).throw(EOFError))
    chat.main(['--device=cpu', '--turn={name}a{text}b', '--user=c', '--reply_as=d'])
    assert 'Using out-new' in capsys.readouterr().out


def test_training_into_a_folder_is_not_guessed_at(runs):
    with pytest.raises(UserError, match='--out_dir=out-old, to go on .* --init_from=resume too'):
        configurator.parse('train', ['out-old'])


def test_config_files(runs):
    with pytest.raises(UserError, match='without --config=, as config/train_mqa_local.py'):
        configurator.parse('train', ['--config=config/train_mqa_local.py'])
    with pytest.raises(UserError, match=r"not found, did you mean config/train_mqa_local.py\?"):
        configurator.parse('train', ['config/train_mqalocal.py'])
    with pytest.raises(UserError) as told:
        configurator.parse('train', ['zzzzzz'])
    assert 'config/train_gpt2.py' in str(told.value) and '__init__' not in str(told.value)
