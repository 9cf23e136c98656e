"""The first commands of a new user: each ends with the next command, or says what is missing.
Programs read the newest run unless a folder is given."""
import os
import subprocess
import sys

import pytest

import configurator
import sample
import train
from common.errors import UserError
from data.text import prepare
from tests.programs.support import ROOT, VANILLA, flags, metrics, run_train


@pytest.mark.parametrize('n_characters, block_size', [(5200, 256), (40, 2)])
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


def test_a_finished_run_has_nothing_to_do(tmp_path, capsys):
    run_train(tmp_path, VANILLA)
    before = (tmp_path / 'ckpt.pt').read_bytes(), metrics(tmp_path)
    capsys.readouterr()
    run_train(tmp_path, VANILLA, init_from='resume', max_iters=10)
    out = capsys.readouterr().out
    assert f'nothing to do: {tmp_path}/ckpt.pt is of iteration 20 of max_iters=10' in out
    assert 'iter ' not in out
    assert ((tmp_path / 'ckpt.pt').read_bytes(), metrics(tmp_path)) == before


BARE = [sys.executable, '-S', '-E']  # without site-packages, and without PYTHONPATH


@pytest.mark.parametrize('program', [
    *(f'{name}.py' for name in ('sample', 'chat', 'serve', 'train', 'bench', 'ablate')),
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob('data/*/prepare.py')),
    *(f'-m {name}' for name in (
        'kv', 'interop.evaluate', 'interop.export', 'interop.convert', 'interop.import_hf',
        'training.memory', 'training.plot'))])
def test_a_python_without_the_packages_is_one_line(program):
    done = subprocess.run([*BARE, *program.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count('\n') == 1
    assert done.stderr.startswith(f'error: this Python ({sys.executable}) has no ')
    assert done.stderr.endswith(' -m pip install -e . (or make demo)\n')


@pytest.mark.skipif(sys.platform != 'linux', reason='the wheels for Linux have GNU OpenMP')
@pytest.mark.parametrize('chosen, expected', [
    ({}, '5000'), ({'GOMP_SPINCOUNT': '7'}, '7'), ({'OMP_WAIT_POLICY': 'PASSIVE'}, '0')])
def test_threads_that_wait_do_not_keep_others_from_running(chosen, expected):
    """OpenMP says what it took. Spinning for longer, a run on a busy machine hardly gets on."""
    environment = {name: value for name, value in os.environ.items()
                   if name not in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY')}
    done = subprocess.run([sys.executable, '-c', 'import configurator, torch'], cwd=ROOT, text=True,
                          capture_output=True,
                          env=environment | chosen | {'OMP_DISPLAY_ENV': 'VERBOSE'})
    assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr


# -- which checkpoint a program reads --------------------------------------------------------------

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
        configurator.parse(train.Settings, [argument])
    begin = "'openwebtext', is not prepared .*: python train.py config/train_mqa_local.py$"
    with pytest.raises(UserError, match=begin):
        train.main([f"--out_dir={runs / 'none'}"])
    assert not (runs / 'none').exists()
