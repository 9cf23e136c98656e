"""Files that were in out_dir before a run: none are lost, whatever is started there by mistake.
Of two runs at once, one writes."""
import os
import shutil
import signal

import pytest

import sample
from common.errors import UserError
from common.folder_lock import only_writer
from tests.programs.support import contents, flags, metrics, run_train
from training.loop.batches import TokenBatches


@pytest.fixture
def old(tmp_path, trained):
    """A folder with a checkpoint at iteration 10."""
    return shutil.copytree(trained['vanilla'], tmp_path / 'out')


@pytest.mark.parametrize('name, iteration, interrupted', [
    ('', 0, False), ('ckpt.pt', 10, True), ('ckpt_best.pt', 10, False)])
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
                                  b'{"iter": ' + b'1' * 5000 + b'}\n'])
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
