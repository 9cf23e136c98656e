"""Files that were in out_dir before a run: none are lost, whatever is started there by mistake."""
import os
import shutil
import signal

import pytest

from tests.programs.support import contents, load, metrics, no_links, raise_signal, run_train
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


@pytest.mark.parametrize('links', [True, False], ids=['hard links', 'no hard links'])
@pytest.mark.parametrize('always', [True, False], ids=['always saved', 'the best saved'])
def test_a_run_from_scratch_keeps_the_old_one_once(
        old, at_step, monkeypatch, capsys, links, always):
    before = contents(old)
    if not links:
        monkeypatch.setattr(os, 'link', no_links)
    at_step(12, raise_signal(signal.SIGINT))
    run_train(old, always_save_checkpoint=always)
    after = contents(old)
    assert after['ckpt_old.pt'] == before['ckpt.pt']
    assert after['metrics_old.jsonl'] == before['metrics.jsonl']
    assert load(old / 'ckpt.pt')['iter_num'] == 13
    assert [row['iter'] for row in metrics(old)] == list(range(13))
    assert capsys.readouterr().out.count(f'kept as {old}/ckpt_old.pt') == 1


@pytest.mark.parametrize('settings', [dict(pos_embedding='rope'), dict(block_size=8)], ids=str)
def test_resuming_with_another_shape_keeps_the_original(old, settings):
    before = contents(old)['ckpt.pt']
    run_train(old, init_from='resume', max_iters=10, **settings)
    assert contents(old)['ckpt_old.pt'] == before
    (old / 'ckpt_old.pt').replace(old / 'ckpt.pt')
    run_train(old, init_from='resume', max_iters=10)  # and it can be resumed as before
    assert 'transformer.wpe.weight' in load(old / 'ckpt.pt')['model']


@pytest.mark.parametrize('line', [b'5\n', b'{"loss": 1}\n', b'\xff\xfe\n', b'{"iter": 3, "lo'])
def test_a_damaged_metrics_file_does_not_keep_a_run_from_resuming(old, line):
    lines = contents(old)['metrics.jsonl'].splitlines(keepends=True)
    (old / 'metrics.jsonl').write_bytes(b''.join(lines[:4]) + line)
    run_train(old, init_from='resume', max_iters=20)
    assert [row['iter'] for row in metrics(old)] == [0, 1, 2, 3, *range(10, 21)]
    assert contents(old).keys() == {'ckpt.pt', 'metrics.jsonl'}
