"""Which checkpoint a program reads: the given folder's, or that of the newest run here."""
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
    """Two runs, the older one saved last but backdated, and folders that are not runs."""
    monkeypatch.chdir(tmp_path)
    for k, name in enumerate(('out-new', 'out-old')):
        run_train(name, VANILLA, max_iters=1, eval_interval=1)
        os.utime(f'{name}/ckpt.pt', (1e9 - k, 1e9 - k))
    (tmp_path / 'out-empty').mkdir()
    return tmp_path


def test_without_arguments_the_newest_run_is_taken_and_named(runs, capsys):
    sample.main(FEW)
    assert 'Using out-new, the newest run here (others: out-old)\n' in capsys.readouterr().out
    (runs / 'out-old').rename(runs / 'out')  # the default folder comes first
    sample.main(FEW)
    assert 'newest' not in capsys.readouterr().out


@pytest.mark.parametrize('program', [sample, chat, serve])
def test_a_folder_is_accepted(program, runs, monkeypatch):
    asked = []
    monkeypatch.setattr(program, 'load', lambda s: asked.append(s.out_dir) or 1 / 0)
    for argv in (['out-old'], ['--seed=1', 'out-old/'], ['--out_dir=x', 'out-old']):
        with pytest.raises(ZeroDivisionError):
            program.main([*argv, *(['--port=0'] if program is serve else [])])
    assert [name.rstrip('/') for name in asked] == ['out-old'] * 3


def test_a_folder_that_was_given_is_not_replaced_by_another(runs):
    for argv, message in (
            (['--out_dir=out-empty', *FEW], 'out-empty/ckpt.pt'),
            (['out-od'], r"^folder of a run 'out-od' not found, did you mean out-old\?$"),
            (['x'], "^folder of a run 'x' not found; there are out-new, out-old$")):
        with pytest.raises(UserError, match=message):
            sample.main(argv)
    for name in ('out-new', 'out-old'):
        (runs / name / 'ckpt.pt').unlink()
    with pytest.raises(UserError, match=r'no out/ckpt.pt, and no out\*/ckpt.pt in this folder'):
        sample.main(FEW)


@pytest.mark.parametrize('argument, message', [
    ('out-old', '--out_dir=out-old, .* --init_from=resume'),
    ('--config=config/train_mqa_local.py', 'without --config=, as config/train_mqa_local.py'),
    ('config/train_mqalocal.py', r'not found, did you mean config/train_mqa_local.py\?'),
    ('zzzzzz', 'config/train_gpt2.py')])
def test_train_takes_config_files_and_no_folder(runs, argument, message):
    with pytest.raises(UserError, match=message):
        configurator.parse('train', [argument])
