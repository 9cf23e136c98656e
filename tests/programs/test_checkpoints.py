"""Which checkpoints a run keeps, their names, and resuming from any of them."""
import os
import shutil
import signal

import pytest
import torch

from common.errors import UserError
from tests.programs.support import (
    HARD, Died, assert_same_weights, contents, die, kept, load, losses, metrics, no_links,
    raise_signal, run_train)

EVERY_2 = dict(checkpoint_interval=2, eval_interval=100)


def killed_at(at_step, n, folder, **settings):
    at_step(n, die)
    with pytest.raises(Died):
        run_train(folder, **settings)


# -- when, and how many ----------------------------------------------------------------------------

def test_killed_it_loses_only_what_came_after_and_resumes_exactly(
        tmp_path, at_step, final_weights, saved):
    run_train(tmp_path / 'whole', **HARD)
    whole, parts = final_weights(), tmp_path / 'parts'
    saved.clear()
    killed_at(at_step, 8, parts, **HARD, checkpoint_interval=5)
    assert kept(parts) == {'ckpt.pt': 5}
    run_train(parts, **HARD, checkpoint_interval=5, init_from='resume')
    assert saved == [5, 10, 15, 20]  # not 5 again, nor those of evaluations twice
    assert losses(parts) == losses(tmp_path / 'whole')
    assert_same_weights(final_weights(), whole)


def test_checkpoints_of_another_run_are_neither_deleted_nor_replaced(
        tmp_path, val_losses, capsys):
    val_losses[3] = 1.0
    run_train(tmp_path, **EVERY_2 | dict(eval_interval=3), max_iters=6)
    shutil.copy(tmp_path / 'ckpt.pt', tmp_path / 'ckpt_0000006.pt')  # of an earlier version
    before = contents(tmp_path)
    run_train(tmp_path, checkpoint_interval=4, eval_interval=100, max_iters=20, seed=2)
    assert capsys.readouterr().out.count(f'kept as {tmp_path}/ckpt_old.pt') == 1
    assert contents(tmp_path)['metrics_old.jsonl'] == before['metrics.jsonl']
    assert [row['iter'] for row in metrics(tmp_path)] == list(range(21))
    run_train(tmp_path, max_iters=1, eval_interval=1, seed=3)
    assert kept(tmp_path) == {'ckpt.pt': 1, 'ckpt_old2.pt': 20, 'ckpt_old.pt': 6,
                              'ckpt_old_best.pt': 3, 'ckpt_0000006.pt': 6}
    after = contents(tmp_path)
    for old, new in (('ckpt.pt', 'ckpt_old.pt'), ('ckpt_best.pt', 'ckpt_old_best.pt'),
                     ('ckpt_0000006.pt', 'ckpt_0000006.pt')):
        assert after[new] == before[old]


# -- the best --------------------------------------------------------------------------------------

@pytest.mark.parametrize('values, always, links, iterations, files', [
    ({0: 8.0, 4: 1.0}, True, False, [2, 4, 6], {'ckpt.pt': 6, 'ckpt_best.pt': 4}),
    ({2: 2.0, 6: 1.0}, True, True, [2, 4, 6], {'ckpt.pt': 6, 'ckpt_best.pt': 6}),
    ({0: 1.0}, True, False, [2, 4, 6], {'ckpt.pt': 6}),  # the untrained model was best
    ({2: 4.0, 4: 3.0, 6: 4.5}, False, True, [2, 4], {'ckpt.pt': 4})], ids=str)
def test_the_best_stays_and_is_not_written_again(tmp_path, val_losses, monkeypatch, saved, values,
                                                 always, links, iterations, files):
    if not links:
        monkeypatch.setattr(os, 'link', no_links)
    val_losses |= values
    run_train(tmp_path, eval_interval=2, max_iters=6, always_save_checkpoint=always)
    assert kept(tmp_path) == files and saved == iterations
    for name, iteration in files.items():
        checkpoint = load(tmp_path / name)
        assert checkpoint['best_val_loss'].item() == min(values.values())
        assert checkpoint['holds_best'] == (values.get(iteration) == min(values.values()))
    if links and files.get('ckpt_best.pt') == 6:
        assert (tmp_path / 'ckpt.pt').samefile(tmp_path / 'ckpt_best.pt')


@pytest.mark.parametrize('settings, words', [
    (dict(max_iters=0), ['none is at iteration 0: give --max_iters=1']),
    (dict(max_iters=6), []), (dict(max_iters=6, checkpoint_interval=5), []),
    (dict(max_iters=6, always_save_checkpoint=False), ['did not improve', '=False: give --always']),
    (dict(max_iters=6, always_save_checkpoint=False, checkpoint_interval=5), []),
    (dict(max_iters=30, always_save_checkpoint=False, init_from='resume'),
     ['did not improve', 'ckpt.pt is still of iteration 10: give --always'])], ids=str)
def test_a_run_that_ends_without_a_checkpoint_says_so(tmp_path, val_losses, capsys, trained, saved,
                                                      settings, words):
    val_losses |= {0: 1.0, 10: 5.0, 20: 5.0, 30: 5.0}
    if 'init_from' in settings:
        shutil.copy(trained['vanilla'] / 'ckpt.pt', tmp_path)
    run_train(tmp_path, **settings)
    notes = [line for line in capsys.readouterr().out.splitlines() if 'no checkpoint' in line]
    assert len(notes) == bool(words) != bool(saved)
    for text in words:
        assert text in notes[0]


def test_it_is_kept_through_kills_and_resumes(tmp_path, val_losses, at_step, capsys):
    val_losses[4] = 1.0
    settings = dict(eval_interval=4, always_save_checkpoint=False, checkpoint_interval=3)
    killed_at(at_step, 5, tmp_path, **settings)
    assert kept(tmp_path) == {'ckpt.pt': 4}  # the best itself
    killed_at(at_step, 7, tmp_path, **settings, init_from='resume')
    assert kept(tmp_path) == {'ckpt.pt': 6, 'ckpt_best.pt': 4}
    assert f'kept as {tmp_path}/ckpt_best.pt' in capsys.readouterr().out
    at_step(10, raise_signal(signal.SIGTERM))
    run_train(tmp_path, **settings, init_from='resume')
    assert kept(tmp_path) == {'ckpt.pt': 11, 'ckpt_best.pt': 4}


# -- resuming from one before the latest -----------------------------------------------------------

def test_later_checkpoints_are_renamed_and_later_rows_dropped(
        tmp_path, final_weights, at_step, val_losses, capsys):
    val_losses[8] = 1.0
    settings = HARD | dict(eval_interval=4, checkpoint_interval=2)
    run_train(tmp_path / 'whole', **settings)
    whole, out = final_weights(), tmp_path / 'parts'
    killed_at(at_step, 13, out, **settings)
    shutil.copy(out / 'ckpt_best.pt', out / 'mine.pt')
    at_step(9, raise_signal(signal.SIGINT))
    run_train(out, **settings, init_from='resume', resume_from='mine.pt')
    assert kept(out).items() >= {'ckpt.pt': 10, 'ckpt_old.pt': 12, 'ckpt_best.pt': 8}.items()
    assert [row['iter'] for row in metrics(out)] == list(range(10))
    assert f'Resuming training from {out}/mine.pt' in capsys.readouterr().out
    run_train(out, **settings, init_from='resume')
    assert losses(out) == losses(tmp_path / 'whole')
    assert_same_weights(final_weights(), whole)


def test_a_checkpoint_without_a_run_id_owns_no_other(tmp_path):
    """For example nanoGPT's, with an unrelated file next to it."""
    run_train(tmp_path, max_iters=6)
    checkpoint = load(tmp_path / 'ckpt.pt')
    del checkpoint['run']
    for name, iteration in {'ckpt.pt': 6, 'ckpt_best.pt': 3}.items():
        torch.save(checkpoint | dict(iter_num=iteration, holds_best=False), tmp_path / name)
    before = contents(tmp_path)
    run_train(tmp_path, **EVERY_2, max_iters=12, init_from='resume')
    assert contents(tmp_path)['ckpt_old_best.pt'] == before['ckpt_best.pt']
    assert kept(tmp_path) == {'ckpt.pt': 12, 'ckpt_old_best.pt': 3}


# -- damaged and missing ---------------------------------------------------------------------------

@pytest.mark.parametrize('share', [0.0, 0.99])
def test_a_missing_or_cut_checkpoint_is_refused_and_whole_ones_are_named(tmp_path, share):
    run_train(tmp_path, **EVERY_2, max_iters=6)
    for name, iteration in (('a', 2), ('b', 4)):
        saved = load(tmp_path / 'ckpt.pt') | dict(iter_num=iteration)
        torch.save(saved, tmp_path / f'ckpt_{name}.pt')
    with pytest.raises(UserError, match=(  # newest first
            r'no checkpoint at .*/ckpt_best.pt: .*: --resume_from=ckpt.pt \(iteration 6\) or '
            r'--resume_from=ckpt_b.pt \(iteration 4\) or '
            r'--resume_from=ckpt_a.pt \(iteration 2\)$')):
        run_train(tmp_path, init_from='resume', resume_from='ckpt_best.pt')
    whole = (tmp_path / 'ckpt.pt').read_bytes()
    cut = whole[:int(len(whole) * share)]
    (tmp_path / 'ckpt.pt').write_bytes(cut)
    (tmp_path / 'ckpt_a.pt').write_bytes(b'damaged too')
    with pytest.raises(UserError) as caught:
        run_train(tmp_path, init_from='resume')
    message = str(caught.value)
    assert f'{tmp_path}/ckpt.pt is damaged' in message and '\n' not in message
    assert message.endswith(
        'there are other checkpoints: --resume_from=ckpt_b.pt (iteration 4)')
    run_train(tmp_path, init_from='resume', resume_from='ckpt_b.pt', max_iters=8)
    assert load(tmp_path / 'ckpt.pt')['iter_num'] == 8
    assert (tmp_path / 'ckpt_old.pt').read_bytes() == cut
