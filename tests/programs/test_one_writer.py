"""Two training runs in one out_dir: one writes, the other stops and says why; readers may read."""
import os
import signal

import pytest
import torch

import sample
from config.errors import UserError
from config.folder_lock import only_writer
from tests.programs.support import (
    FULL_STACK,
    VANILLA,
    contents,
    flags,
    metrics,
    run_train,
    start_program,
)

ENDLESS = FULL_STACK | dict(max_iters=100000, lr_decay_iters=100000)


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
        assert after.keys() - before.keys() == {'.lock'}
        assert 'Resuming' not in capsys.readouterr().out


def test_readers_need_no_lock(tmp_path, capsys):
    out = tmp_path / 'out'
    run_train(out, max_iters=3)
    with only_writer(out, ''):
        run_train(out, init_from='resume', eval_only=True)
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


def test_a_killed_run_leaves_a_checkpoint_and_is_no_obstacle(tmp_path, data_root):
    out = tmp_path / 'out'
    first = start_program('train', *flags(ENDLESS | dict(out_dir=out, checkpoint_interval=5)),
                          data_root=data_root)
    for line in first.stdout:
        if line.startswith('iter 7:'):
            first.kill()
            break
    first.communicate(timeout=60)
    assert first.returncode == -signal.SIGKILL and (out / '.lock').exists()
    done = torch.load(out / 'ckpt.pt', weights_only=True)['iter_num']
    assert done >= 5
    run_train(out, ENDLESS, init_from='resume', max_iters=done + 5)
    assert [row['iter'] for row in metrics(out)] == list(range(done + 6))
    assert not (out / '.lock').exists()
