"""Files that were in out_dir before a run: none are lost, whatever is started there by mistake.
Of two runs at once, one writes."""
import os
import shutil
import signal

import pytest

import sample
from config.errors import UserError
from config.folder_lock import only_writer
from tests.programs.support import VANILLA, contents, flags, metrics, run_train, start_program
from training.batches import TokenBatches


@pytest.fixture
def old(tmp_path, trained):
    """A folder with a checkpoint at iteration 10."""
    return shutil.copytree(trained['vanilla'], tmp_path / 'out')


@pytest.mark.parametrize('interrupted', [False, True], ids=['whole', 'Ctrl-C'])
@pytest.mark.parametrize('name, iteration', [('', 0), ('ckpt.pt', 10), ('ckpt_best.pt', 10)])
def test_evaluating_alone_writes_nothing(old, capsys, monkeypatch, interrupted, name, iteration):
    shutil.copy(old / 'ckpt.pt', old / 'ckpt_best.pt')
    plain, before = TokenBatches.evaluation, contents(old)

    def evaluation(batches, *args):
        for batch in plain(batches, *args):
            yield batch
            if interrupted:
                os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.setattr(TokenBatches, 'evaluation', evaluation)
    resumed = dict(init_from='resume', resume_from=name) if name else {}
    run_train(old, eval_only=True, eval_interval=7, **resumed)
    out = capsys.readouterr().out
    assert out.count('\nstep ') == out.count(f'\nstep {iteration}:') == 1 - interrupted
    assert '\niter ' not in out and contents(old) == before


def test_resuming_with_another_shape_keeps_the_original(old):
    before = contents(old)['ckpt.pt']
    run_train(old, init_from='resume', max_iters=10, block_size=8)
    assert contents(old)['ckpt_old.pt'] == before


@pytest.mark.parametrize('line', [b'5\n', b'{"loss": 1}\n', b'\xff\xfe\n', b'[' * 60_000 + b'\n',
                                  b'{"iter": ' + b'1' * 5000 + b'}\n', b'"' + b'x' * 2 ** 20])
def test_a_damaged_metrics_file_does_not_keep_a_run_from_resuming(old, line):
    lines = contents(old)['metrics.jsonl'].splitlines(keepends=True)
    (old / 'metrics.jsonl').write_bytes(b''.join(lines[:4]) + line)
    run_train(old, init_from='resume', max_iters=20)
    assert [row['iter'] for row in metrics(old)] == [0, 1, 2, 3, *range(10, 21)]
    assert contents(old).keys() == {'ckpt.pt', 'metrics.jsonl'}


# -- two runs at once ------------------------------------------------------------------------------

def test_the_second_is_refused_before_it_writes_or_loads_anything(tmp_path, capsys):
    out = tmp_path / 'out'
    run_train(out)
    before = contents(out)
    capsys.readouterr()
    with only_writer(out, ''):
        for settings in ({}, dict(init_from='resume', max_iters=30)):
            with pytest.raises(UserError, match='give another --out_dir') as refused:
                run_train(out, **settings)
            holder = f'{out} is being written by process {os.getpid()} on '
            assert str(refused.value).startswith(holder)
        after = contents(out)
        assert '.lock' in after and after | before == after
        assert 'Resuming' not in capsys.readouterr().out
        run_train(out, init_from='resume', eval_only=True)  # readers need no lock
        assert 'val loss' in capsys.readouterr().out
        sample.main(flags(dict(out_dir=out, num_samples=1, max_new_tokens=5, device='cpu')))


@pytest.mark.slow
def test_under_torchrun(tmp_path, data_root):
    """Rank 0 holds the lock: all processes of a second launch are refused."""
    out = tmp_path / 'out'
    settings = VANILLA | dict(out_dir=out, gradient_accumulation_steps=2)
    with only_writer(out, ''):
        refused = start_program('train', *flags(settings), data_root=data_root,
                                torchrun=['--standalone', '--nproc_per_node=2'])
        _, err = refused.communicate(timeout=120)
        assert refused.returncode != 0 and 'is being written by process' in err
        assert contents(out).keys() == {'.lock'}
