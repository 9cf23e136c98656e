"""What lay in out_dir before a run: nothing that another run wrote is lost, whatever is started there by mistake."""
import os
import shutil
import signal

import pytest
import torch

from tests.programs.support import VANILLA, load, metrics, run_train
from training.batches import TokenBatches


@pytest.fixture
def old(tmp_path, trained):
    """A folder with a checkpoint at iteration 10, and its bytes."""
    out = tmp_path / 'out'
    shutil.copytree(trained['vanilla'], out)
    return out, (out / 'ckpt.pt').read_bytes(), (out / 'metrics.jsonl').read_bytes()


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def interrupted_evaluation(monkeypatch):
    plain = TokenBatches.evaluation

    def evaluation(batches, *args):
        for batch in plain(batches, *args):
            yield batch
            interrupt()
    monkeypatch.setattr(TokenBatches, 'evaluation', evaluation)


@pytest.mark.parametrize('settings', [{}, dict(init_from='resume')], ids=['scratch', 'resume'])
def test_ctrl_c_in_an_evaluation_alone_writes_nothing(old, interrupted_evaluation, settings):
    out, checkpoint, rows = old
    run_train(out, eval_only=True, **settings)
    assert (out / 'ckpt.pt').read_bytes() == checkpoint and (out / 'metrics.jsonl').read_bytes() == rows
    assert {p.name for p in out.iterdir()} == {'ckpt.pt', 'metrics.jsonl'}


@pytest.mark.parametrize('always', [True, False])
def test_a_forgotten_resume_and_ctrl_c_keep_the_old_checkpoint(old, at_step, capsys, always):
    out, checkpoint, rows = old
    at_step(2, interrupt)
    run_train(out, always_save_checkpoint=always)
    assert (out / 'ckpt_old.pt').read_bytes() == checkpoint and (out / 'metrics_old.jsonl').read_bytes() == rows
    assert load(out / 'ckpt.pt')['iter_num'] == 3 and f'kept as {out}/ckpt_old.pt' in capsys.readouterr().out


def test_a_new_run_keeps_it_once_and_then_owns_its_own(old, capsys):
    out, checkpoint, _ = old
    run_train(out, max_iters=20)
    assert (out / 'ckpt_old.pt').read_bytes() == checkpoint and load(out / 'ckpt.pt')['iter_num'] == 20
    assert capsys.readouterr().out.count('kept as') == 1


def test_resuming_keeps_nothing_beside(old):
    run_train(old[0], init_from='resume', max_iters=20)
    assert {p.name for p in old[0].iterdir()} == {'ckpt.pt', 'metrics.jsonl'} and len(metrics(old[0])) == 21


@pytest.mark.parametrize('settings', [dict(pos_embedding='rope'), dict(block_size=8)], ids=str)
def test_resuming_with_another_shape_keeps_the_original(old, settings):
    out, checkpoint, _ = old
    run_train(out, init_from='resume', max_iters=10, **settings)
    assert (out / 'ckpt_old.pt').read_bytes() == checkpoint
    (out / 'ckpt_old.pt').replace(out / 'ckpt.pt')
    run_train(out, init_from='resume', max_iters=10)  # and that can be gone on with as before
    assert 'transformer.wpe.weight' in load(out / 'ckpt.pt')['model']


def test_a_file_system_without_hard_links(old, at_step, monkeypatch):
    out, checkpoint, _ = old
    monkeypatch.setattr(os, 'link', lambda *_: (_ for _ in ()).throw(OSError('no links')))
    at_step(2, interrupt)
    run_train(out)
    assert (out / 'ckpt_old.pt').read_bytes() == checkpoint
    resumed = run_train(out, VANILLA, init_from='resume', max_iters=5)
    assert [row['iter'] for row in resumed.rows] == list(range(6))


@pytest.mark.parametrize('line', [b'5\n', b'{"loss": 1}\n', b'\xff\xfe\n', b'{"iter": 3, "lo'])
def test_a_damaged_metrics_file_does_not_keep_a_run_from_resuming(old, line):
    out, _, rows = old
    (out / 'metrics.jsonl').write_bytes(b''.join(rows.splitlines(keepends=True)[:4]) + line)
    run_train(out, init_from='resume', max_iters=12)
    assert [row['iter'] for row in metrics(out)] == [0, 1, 2, 3, 10, 11, 12]


def test_the_update_is_computed_as_here_wherever_the_checkpoint_comes_from(old):
    out = old[0]
    checkpoint = load(out / 'ckpt.pt')
    for group in checkpoint['optimizer']['param_groups']:
        group['fused'] = None
    torch.save(checkpoint, out / 'ckpt.pt')
    run = run_train(out, init_from='resume', max_iters=12)
    assert all(group['fused'] for group in load(run.path)['optimizer']['param_groups'])
