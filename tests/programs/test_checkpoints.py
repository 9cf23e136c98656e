"""Which checkpoints of a run there are, under which names, and going on from any of them."""
import os
import signal

import pytest
import torch

import train
from config.errors import UserError
from tests.programs.support import (
    HARD,
    Died,
    assert_same_weights,
    die,
    load,
    losses,
    metrics,
    raise_signal,
    run_train,
)

NO_LINKS = pytest.mark.parametrize('links', [True, False], ids=['hard links', 'no hard links'])


def kept(folder):
    """Iteration of every checkpoint in the folder, by name."""
    return {p.name: load(p)['iter_num'] for p in sorted(folder.glob('*.pt'))}


def killed_at(at_step, n, folder, **settings):
    at_step(n, die)
    with pytest.raises(Died):
        run_train(folder, **settings)


@pytest.fixture
def saved(monkeypatch):
    """Iterations at which a checkpoint was written."""
    written, plain = [], torch.save
    monkeypatch.setattr(torch, 'save', lambda checkpoint, f: (written.append(checkpoint['iter_num']), plain(checkpoint, f)))
    return written


# -- every so many iterations -----------------------------------------------------------------------------------------

def test_saves_come_in_between_evaluations_and_not_twice_with_them(tmp_path, saved):
    run_train(tmp_path, checkpoint_interval=4, eval_interval=6)
    assert saved == [4, 6, 8, 12, 16, 18, 20]


def test_they_come_where_an_evaluation_was_no_improvement_too(tmp_path, saved, val_losses):
    val_losses[10] = 1.0
    run_train(tmp_path, checkpoint_interval=5, eval_interval=5, always_save_checkpoint=False)
    assert saved == [5, 10, 15, 20] and kept(tmp_path) == {'ckpt.pt': 20, 'ckpt_best.pt': 10}


def test_a_resumed_run_does_not_save_first_what_it_has(tmp_path, saved, at_step):
    killed_at(at_step, 9, tmp_path, checkpoint_interval=4, eval_interval=100)
    assert saved == [4, 8]
    run_train(tmp_path, checkpoint_interval=4, eval_interval=100, init_from='resume')
    assert saved == [4, 8, 12, 16, 20]


def test_killed_it_loses_only_what_came_after_and_goes_on_to_the_same_losses(tmp_path, at_step, final_weights):
    run_train(tmp_path / 'whole', **HARD)
    whole = final_weights()
    killed_at(at_step, 8, tmp_path / 'parts', **HARD, checkpoint_interval=3)
    assert kept(tmp_path / 'parts') == {'ckpt.pt': 6}
    run_train(tmp_path / 'parts', **HARD, checkpoint_interval=3, init_from='resume')
    assert losses(tmp_path / 'parts') == losses(tmp_path / 'whole')
    assert_same_weights(final_weights(), whole)


# -- the last few -----------------------------------------------------------------------------------------------------

FEW = dict(checkpoint_interval=2, eval_interval=100, keep_checkpoints=3)


def test_the_last_ones_stay_and_older_ones_go(tmp_path):
    run_train(tmp_path, **FEW, max_iters=9)
    assert kept(tmp_path) == {'ckpt.pt': 9, 'ckpt_0000006.pt': 6, 'ckpt_0000008.pt': 8}


def test_a_resumed_run_counts_those_of_before(tmp_path, at_step):
    killed_at(at_step, 7, tmp_path, **FEW)
    assert kept(tmp_path) == {'ckpt.pt': 6, 'ckpt_0000002.pt': 2, 'ckpt_0000004.pt': 4}
    killed_at(at_step, 9, tmp_path, **FEW, init_from='resume')
    assert kept(tmp_path) == {'ckpt.pt': 8, 'ckpt_0000004.pt': 4, 'ckpt_0000006.pt': 6}


def test_with_1_none_is_made_and_none_is_deleted(tmp_path, at_step):
    killed_at(at_step, 7, tmp_path, **FEW)
    run_train(tmp_path, init_from='resume', max_iters=10, checkpoint_interval=2)
    assert kept(tmp_path) == {'ckpt.pt': 10, 'ckpt_0000002.pt': 2, 'ckpt_0000004.pt': 4}


def test_each_of_them_is_whole_and_can_be_gone_on_from(tmp_path, at_step, final_weights):
    run_train(tmp_path / 'whole', **HARD)
    whole = final_weights()
    killed_at(at_step, 13, tmp_path / 'parts', **HARD, **FEW)
    for name in ('ckpt_0000010.pt', 'ckpt_0000008.pt'):
        run_train(tmp_path / 'parts', **HARD, init_from='resume', resume_from=name)
        assert losses(tmp_path / 'parts') == losses(tmp_path / 'whole')
        assert_same_weights(final_weights(), whole)


def test_those_of_another_run_are_neither_deleted_nor_replaced(tmp_path):
    run_train(tmp_path, **FEW, max_iters=6)
    files = {name: (tmp_path / name).read_bytes() for name in ('ckpt.pt', 'ckpt_0000002.pt', 'ckpt_0000004.pt')}
    run_train(tmp_path, **FEW | dict(checkpoint_interval=4), max_iters=20, seed=2)
    assert kept(tmp_path) == {'ckpt.pt': 20, 'ckpt_0000012.pt': 12, 'ckpt_0000016.pt': 16, 'ckpt_0000002.pt': 2,
                              'ckpt_old.pt': 6, 'ckpt_old_0000004.pt': 4}
    assert (tmp_path / 'ckpt_old.pt').read_bytes() == files['ckpt.pt']
    assert (tmp_path / 'ckpt_old_0000004.pt').read_bytes() == files['ckpt_0000004.pt']
    assert (tmp_path / 'ckpt_0000002.pt').read_bytes() == files['ckpt_0000002.pt']


@pytest.mark.parametrize('n', [1, 2, 3])
def test_no_new_run_takes_the_place_of_an_old_one(tmp_path, n):
    for seed in range(n + 1):
        run_train(tmp_path, max_iters=seed, eval_interval=1, seed=seed)
    run_train(tmp_path, max_iters=9)
    names = ['ckpt_old.pt', 'ckpt_old2.pt', 'ckpt_old3.pt'][:n]  # the first run saved nothing
    assert kept(tmp_path) == {'ckpt.pt': 9} | {name: i for i, name in enumerate(names, 1)}


# -- the best ---------------------------------------------------------------------------------------------------------

@NO_LINKS
def test_the_best_stays_where_every_evaluation_is_saved(tmp_path, val_losses, monkeypatch, links, saved):
    if not links:
        monkeypatch.setattr(os, 'link', lambda *_: (_ for _ in ()).throw(OSError('no links')))
    val_losses |= {0: 8.0, 4: 1.0}
    run_train(tmp_path, eval_interval=2, max_iters=8)
    assert kept(tmp_path) == {'ckpt.pt': 8, 'ckpt_best.pt': 4} and saved == [2, 4, 6, 8]
    assert [load(tmp_path / name)['best_val_loss'].item() for name in kept(tmp_path)] == [1.0, 1.0]
    assert [load(tmp_path / name)['holds_best'] for name in kept(tmp_path)] == [False, True]


def test_once_there_it_follows_what_is_better_without_being_written_again(tmp_path, val_losses, saved):
    val_losses |= {2: 2.0, 6: 1.0}
    run_train(tmp_path, eval_interval=2, max_iters=6)
    assert kept(tmp_path) == {'ckpt.pt': 6, 'ckpt_best.pt': 6} and saved == [2, 4, 6]
    assert (tmp_path / 'ckpt.pt').samefile(tmp_path / 'ckpt_best.pt')


def test_where_the_model_was_best_before_its_first_step_there_is_none(tmp_path, val_losses):
    val_losses[0] = 1.0
    run_train(tmp_path, eval_interval=2, max_iters=6)
    assert kept(tmp_path) == {'ckpt.pt': 6} and load(tmp_path / 'ckpt.pt')['best_val_loss'].item() == 1.0


def test_it_is_kept_through_kills_and_resumes(tmp_path, val_losses, at_step):
    val_losses[4] = 1.0
    settings = dict(eval_interval=4, always_save_checkpoint=False, checkpoint_interval=3)
    killed_at(at_step, 5, tmp_path, **settings)
    assert kept(tmp_path) == {'ckpt.pt': 4}  # the best itself
    killed_at(at_step, 7, tmp_path, **settings, init_from='resume')
    assert kept(tmp_path) == {'ckpt.pt': 6, 'ckpt_best.pt': 4}
    at_step(10, raise_signal(signal.SIGTERM))
    run_train(tmp_path, **settings, init_from='resume')
    assert kept(tmp_path) == {'ckpt.pt': 11, 'ckpt_best.pt': 4}


def test_evaluated_again_after_a_resume_it_is_still_the_best(tmp_path, val_losses):
    val_losses[4] = 1.0
    run_train(tmp_path, eval_interval=4, max_iters=4)
    val_losses[4] = 1.5  # as with more eval_iters
    run_train(tmp_path, eval_interval=4, max_iters=8, init_from='resume')
    assert kept(tmp_path) == {'ckpt.pt': 8, 'ckpt_best.pt': 4}


def test_another_runs_best_steps_aside(tmp_path, val_losses, capsys):
    val_losses[2] = 1.0
    run_train(tmp_path, eval_interval=2, max_iters=4)
    run_train(tmp_path, eval_interval=1, max_iters=1, seed=2)
    assert kept(tmp_path) == {'ckpt.pt': 1, 'ckpt_old.pt': 4, 'ckpt_old_best.pt': 2}
    assert f'kept as {tmp_path}/ckpt_old_best.pt' in capsys.readouterr().out


# -- going on from another than the latest ----------------------------------------------------------------------------

def test_what_is_ahead_steps_aside_and_its_rows_go(tmp_path, final_weights, at_step, capsys):
    run_train(tmp_path / 'whole', **HARD)
    whole, out = final_weights(), tmp_path / 'parts'
    killed_at(at_step, 13, out, **HARD, **FEW)
    at_step(8, raise_signal(signal.SIGINT))
    run_train(out, **HARD, **FEW, init_from='resume', resume_from='ckpt_0000008.pt')
    assert kept(out) == {'ckpt.pt': 9, 'ckpt_0000008.pt': 8, 'ckpt_old.pt': 12, 'ckpt_old_0000010.pt': 10}
    assert [row['iter'] for row in metrics(out)] == list(range(9))
    assert f'Resuming training from {out}/ckpt_0000008.pt' in capsys.readouterr().out
    run_train(out, **HARD, init_from='resume')
    assert losses(out) == losses(tmp_path / 'whole')
    assert_same_weights(final_weights(), whole)


def test_going_on_from_the_best(tmp_path, val_losses):
    val_losses[4] = 1.0
    run_train(tmp_path, eval_interval=4, max_iters=12)
    run_train(tmp_path, eval_interval=6, max_iters=6, init_from='resume', resume_from='ckpt_best.pt')
    assert kept(tmp_path) == {'ckpt.pt': 6, 'ckpt_best.pt': 4, 'ckpt_old.pt': 12}
    assert load(tmp_path / 'ckpt.pt')['best_val_loss'].item() == 1.0


def test_the_best_that_is_gone_on_from_gets_its_name_before_it_is_deleted(tmp_path, val_losses):
    val_losses[2] = 1.0
    run_train(tmp_path, **FEW | dict(eval_interval=2), max_iters=6)
    (tmp_path / 'ckpt_best.pt').unlink()
    run_train(tmp_path, max_iters=20, **FEW | dict(keep_checkpoints=2), init_from='resume', resume_from='ckpt_0000002.pt')
    assert kept(tmp_path)['ckpt_best.pt'] == 2 and 'ckpt_0000002.pt' not in kept(tmp_path)


def test_going_on_from_an_old_run_keeps_it(tmp_path):
    run_train(tmp_path, max_iters=5)
    before = (tmp_path / 'ckpt.pt').read_bytes()
    run_train(tmp_path, max_iters=3)  # a forgotten --init_from=resume
    run_train(tmp_path, max_iters=7, init_from='resume', resume_from='ckpt_old.pt')
    assert kept(tmp_path) == {'ckpt.pt': 7, 'ckpt_old.pt': 5, 'ckpt_old2.pt': 3}
    assert (tmp_path / 'ckpt_old.pt').read_bytes() == before


def test_going_on_from_a_file_that_tells_no_run_takes_no_other_such_file_for_its_own(tmp_path):
    """Such as nanoGPT's, and what somebody put beside it."""
    run_train(tmp_path, max_iters=6)
    checkpoint = load(tmp_path / 'ckpt.pt')
    del checkpoint['run']
    for name, iteration in (('ckpt.pt', 6), ('ckpt_best.pt', 3), ('ckpt_0000001.pt', 1), ('ckpt_0000002.pt', 2)):
        torch.save(checkpoint | dict(iter_num=iteration, holds_best=False), tmp_path / name)
    others = {name: (tmp_path / name).read_bytes() for name in ('ckpt_best.pt', 'ckpt_0000001.pt', 'ckpt_0000002.pt')}
    run_train(tmp_path, **FEW | dict(keep_checkpoints=2), max_iters=12, init_from='resume')
    held = [p.read_bytes() for p in tmp_path.glob('*.pt')]
    assert all(content in held for content in others.values())
    assert kept(tmp_path)['ckpt.pt'] == 12 and 'ckpt_old.pt' not in kept(tmp_path)


def test_metrics_are_kept_where_an_earlier_checkpoint_is_gone_on_from(tmp_path, at_step):
    run_train(tmp_path, **FEW, max_iters=8)
    before = (tmp_path / 'metrics.jsonl').read_bytes()
    at_step(4, die)
    with pytest.raises(Died):
        run_train(tmp_path, **FEW, max_iters=8, init_from='resume', resume_from='ckpt_0000004.pt')
    assert (tmp_path / 'metrics_old.jsonl').read_bytes() == before


def test_evaluating_the_best_alone_writes_nothing(tmp_path, val_losses, capsys):
    val_losses[4] = 1.0
    run_train(tmp_path, eval_interval=4, max_iters=8)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    capsys.readouterr()
    run_train(tmp_path, eval_only=True, init_from='resume', resume_from='ckpt_best.pt')
    assert 'step 4: ' in capsys.readouterr().out and {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


# -- damaged ones -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('share', [0.0, 0.5, 0.99])
def test_a_cut_checkpoint_is_refused_with_the_others_that_are_whole(tmp_path, share):
    run_train(tmp_path, **FEW, max_iters=6)
    whole = (tmp_path / 'ckpt.pt').read_bytes()
    (tmp_path / 'ckpt.pt').write_bytes(whole[:int(len(whole) * share)])
    (tmp_path / 'ckpt_0000002.pt').write_bytes(b'damaged too')
    with pytest.raises(UserError) as caught:
        run_train(tmp_path, init_from='resume')
    message = str(caught.value)
    assert f'{tmp_path}/ckpt.pt is damaged' in message and '\n' not in message
    assert message.endswith('there are other checkpoints: --resume_from=ckpt_0000004.pt (iteration 4)')
    run_train(tmp_path, init_from='resume', resume_from='ckpt_0000004.pt', max_iters=8)
    assert load(tmp_path / 'ckpt.pt')['iter_num'] == 8
    assert (tmp_path / 'ckpt_old.pt').read_bytes() == whole[:int(len(whole) * share)]


def test_where_the_named_one_is_missing_the_latest_is_named(tmp_path):
    run_train(tmp_path, max_iters=6)
    with pytest.raises(UserError, match=r'no checkpoint at .*/ckpt_best.pt: .*: --resume_from=ckpt.pt \(iteration 6\)$'):
        run_train(tmp_path, init_from='resume', resume_from='ckpt_best.pt')


def test_where_ckpt_is_missing_the_others_are_named_the_newest_first(tmp_path):
    run_train(tmp_path, **FEW, max_iters=6)
    (tmp_path / 'ckpt.pt').unlink()
    with pytest.raises(UserError, match=r'no checkpoint at .*: --resume_from=ckpt_0000004.pt \(iteration 4\) or '
                                        r'--resume_from=ckpt_0000002.pt \(iteration 2\)$'):
        train.main([f'--out_dir={tmp_path}', '--dataset=tiny', '--init_from=resume', '--device=cpu'])
