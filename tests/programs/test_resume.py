"""Interrupted and resumed training is uninterrupted training, to the last bit on a CPU."""
import os
import shutil
import signal

import numpy as np
import pytest
import torch

from config.errors import UserError
from tests.programs.support import (
    BOTH,
    FULL_STACK,
    HARD,
    VANILLA,
    Died,
    assert_same_weights,
    die,
    load,
    losses,
    metrics,
    raise_signal,
    run_train,
)
from training.batches import TokenBatches


@pytest.fixture
def check_resume(tmp_path, at_step, final_weights):
    """Uninterrupted against stopped during iteration `stop` and resumed: same losses, same weights."""
    def check(config, number=signal.SIGINT, stop=7, then=(), **settings):
        settings = HARD | settings
        run_train(tmp_path / 'whole', config, **settings)
        whole = final_weights()
        at_step(stop, raise_signal(number))
        first = run_train(tmp_path / 'parts', config, **settings)
        assert load(first.path)['iter_num'] == stop + 1 and [i for i, _ in losses(tmp_path / 'parts')][-1] == stop
        torch.manual_seed(99)  # nothing may depend on what is left in the process
        np.random.seed(99)
        run_train(tmp_path / 'parts', config, init_from='resume', **settings | dict(then))
        assert losses(tmp_path / 'parts') == losses(tmp_path / 'whole')
        assert_same_weights(final_weights(), whole)
    return check


@pytest.mark.parametrize('config, number', [(VANILLA, signal.SIGINT), (FULL_STACK, signal.SIGTERM)])
def test_stopped_by_a_signal_and_resumed_gives_the_same_losses_and_weights(check_resume, config, number):
    check_resume(config, number)


@pytest.mark.parametrize('stop', [0, 9, 10, 18])
def test_wherever_it_was_stopped(check_resume, stop):
    check_resume(VANILLA, stop=stop)


def test_changing_how_often_is_evaluated_changes_no_loss(check_resume):
    check_resume(FULL_STACK, then=dict(eval_interval=3, eval_iters=5))


def test_how_often_is_evaluated_changes_no_loss_in_one_run_either(tmp_path, final_weights):
    runs = []
    for interval in (1, 7, 100):
        run_train(tmp_path / str(interval), **HARD, eval_interval=interval)
        runs.append((losses(tmp_path / str(interval)), final_weights()))
    assert runs[0][0] == runs[1][0] == runs[2][0]
    assert_same_weights(runs[0][1], runs[2][1])


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_in_mixed_precision_with_its_loss_scaler(check_resume, dtype):
    check_resume(VANILLA, dtype=dtype)


def test_the_loss_scale_goes_on_where_it_stood(tmp_path, monkeypatch, at_step):
    """A scale that starts too high overflows, is halved, and must not start too high again."""
    plain = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, 'GradScaler', lambda device, **kw: plain(device, init_scale=2.0 ** 28, **kw))
    run_train(tmp_path / 'whole', dtype='float16')
    at_step(12, raise_signal(signal.SIGTERM))
    run = run_train(tmp_path / 'parts', dtype='float16')
    assert 2.0 ** 15 < load(run.path)['scaler']['scale'] < 2.0 ** 28
    assert run.rows[-1]['loss'] < run.rows[0]['loss'] - 0.1  # it did find a scale that works
    run_train(tmp_path / 'parts', dtype='float16', init_from='resume')
    assert losses(tmp_path / 'parts') == losses(tmp_path / 'whole')


@pytest.mark.parametrize('policy', ['block', 'offload', *(pytest.param(policy, marks=pytest.mark.slow)
                                                        for policy in ('selective', 'mlp', 'every:3', 'sqrt'))])
def test_with_recomputation(check_resume, policy):
    check_resume(FULL_STACK, recompute=policy)


def test_with_grad_clip_off_and_thin_logs(check_resume):
    check_resume(VANILLA, grad_clip=0.0, decay_lr=False)


def test_stopped_many_times(tmp_path, at_step, final_weights):
    run_train(tmp_path / 'whole', **HARD)
    whole = final_weights()
    for i, stop in enumerate([2, 3, 11, None]):
        if stop:
            at_step(stop, raise_signal(signal.SIGTERM))
        run_train(tmp_path / 'parts', **HARD, init_from='resume' if i else 'scratch')
    assert losses(tmp_path / 'parts') == losses(tmp_path / 'whole')
    assert_same_weights(final_weights(), whole)


@BOTH
def test_killed_outright_it_goes_on_from_the_last_checkpoint_and_logs_each_step_once(tmp_path, at_step, config):
    run_train(tmp_path / 'whole', config, **HARD)
    at_step(14, die)
    with pytest.raises(Died):
        run_train(tmp_path / 'parts', config, **HARD)
    assert [i for i, _ in losses(tmp_path / 'parts')] == list(range(14))
    assert load(tmp_path / 'parts' / 'ckpt.pt')['iter_num'] == 10
    run_train(tmp_path / 'parts', config, **HARD, init_from='resume')
    assert losses(tmp_path / 'parts') == losses(tmp_path / 'whole')


def test_a_metrics_line_cut_short_by_a_crash_is_dropped(tmp_path, at_step):
    run_train(tmp_path / 'whole')
    at_step(13, die)
    with pytest.raises(Died):
        run_train(tmp_path / 'parts')
    path = tmp_path / 'parts' / 'metrics.jsonl'
    path.write_text(path.read_text()[:-20])
    run_train(tmp_path / 'parts', init_from='resume')
    assert losses(tmp_path / 'parts') == losses(tmp_path / 'whole')


def test_evaluations_of_a_resumed_run_are_the_same_too(tmp_path, at_step):
    run_train(tmp_path / 'whole', **HARD)
    at_step(7, raise_signal(signal.SIGINT))
    run_train(tmp_path / 'parts', **HARD)
    run_train(tmp_path / 'parts', **HARD, init_from='resume')
    vals = [[(row['iter'], row['train_loss'], row['val_loss']) for row in metrics(tmp_path / d) if 'val_loss' in row]
            for d in ('whole', 'parts')]
    assert vals[0] == vals[1] and [row[0] for row in vals[0]] == [0, 10, 20]


def test_a_finished_run_resumed_for_longer_trains_on(tmp_path, final_weights):
    settings = HARD | dict(decay_lr=False)
    run_train(tmp_path / 'whole', **settings)
    whole = final_weights()
    run_train(tmp_path / 'parts', **settings, max_iters=10)
    run_train(tmp_path / 'parts', **settings, init_from='resume')
    assert losses(tmp_path / 'parts') == losses(tmp_path / 'whole')
    assert_same_weights(final_weights(), whole)


# -- stopping ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_answered_with_what_was_saved_and_how_to_go_on(tmp_path, at_step, capsys, number):
    at_step(3, raise_signal(number))
    run = run_train(tmp_path)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f'{number.name}: saved iteration 4 to {run.path}; go on with --init_from=resume'
    assert {p.name for p in tmp_path.iterdir()} == {'ckpt.pt', 'metrics.jsonl'}


def test_signal_handlers_are_put_back(tmp_path, at_step):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    at_step(1, raise_signal(signal.SIGINT))
    run_train(tmp_path)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_signal_during_an_evaluation_ends_it_without_a_half_mean(tmp_path, capsys, monkeypatch):
    plain = TokenBatches.evaluation

    def evaluation(batches, split, n, seed):
        if split == 'val':
            os.kill(os.getpid(), signal.SIGINT)
        yield from plain(batches, split, n, seed)
    with monkeypatch.context() as patch:
        patch.setattr(TokenBatches, 'evaluation', evaluation)
        run = run_train(tmp_path / 'parts')
    assert load(run.path)['iter_num'] == 0 and losses(tmp_path / 'parts') == []
    assert 'step 0:' not in capsys.readouterr().out
    run_train(tmp_path / 'whole')
    run_train(tmp_path / 'parts', init_from='resume')
    assert losses(tmp_path / 'parts') == losses(tmp_path / 'whole')


def test_a_second_interrupt_does_not_wait(tmp_path, at_step):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    at_step(3, twice)
    with pytest.raises(KeyboardInterrupt):
        run_train(tmp_path)


class Gone:
    """A stdout whose reader went away, as `tee` does when Ctrl-C ends the whole pipe."""

    def write(self, text):
        raise BrokenPipeError

    flush = isatty = lambda self: False


def test_an_interrupt_saves_though_nobody_reads_the_log_any_more(tmp_path, at_step, monkeypatch):
    def interrupt():
        monkeypatch.setattr('sys.stdout', Gone())
        os.kill(os.getpid(), signal.SIGINT)
    at_step(3, interrupt)
    run_train(tmp_path)
    assert load(tmp_path / 'ckpt.pt')['iter_num'] == 4


def test_model_keys_that_differ_from_the_checkpoint_are_passed_over_and_said_so(tmp_path, capsys):
    run_train(tmp_path, max_iters=5)
    run_train(tmp_path, max_iters=6, n_layer=5, bias=True, init_from='resume')
    out = capsys.readouterr().out
    assert 'n_layer = 2, as in the checkpoint (not 5)' in out and 'bias = False, as in the checkpoint (not True)' in out
    saved = load(tmp_path / 'ckpt.pt')
    assert saved['config']['n_layer'] == saved['model_args']['n_layer'] == 2 and saved['config']['bias'] is False


def test_optimizer_settings_are_todays_after_a_resume(tmp_path):
    run_train(tmp_path, max_iters=5)
    run_train(tmp_path, max_iters=6, init_from='resume', weight_decay=0.5, beta2=0.5)
    decay, no_decay = load(tmp_path / 'ckpt.pt')['optimizer']['param_groups']
    assert (decay['weight_decay'], no_decay['weight_decay']) == (0.5, 0.0)
    assert decay['betas'][1] == no_decay['betas'][1] == 0.5


def test_eval_only_leaves_the_metrics_alone(tmp_path):
    run_train(tmp_path, max_iters=5)
    before = (tmp_path / 'metrics.jsonl').read_bytes()
    for start in ('resume', 'scratch'):
        run_train(tmp_path, eval_only=True, init_from=start)
        assert (tmp_path / 'metrics.jsonl').read_bytes() == before


# -- the best checkpoint, where only improvements are saved -----------------------------------------------------------

BEST_ONLY = dict(always_save_checkpoint=False, eval_interval=2)


def test_the_best_so_far_is_kept_beside_what_an_interrupt_saves(tmp_path, at_step, val_losses, capsys):
    val_losses[4] = 1.0
    at_step(6, raise_signal(signal.SIGINT))
    run_train(tmp_path, **BEST_ONLY)
    assert load(tmp_path / 'ckpt.pt')['iter_num'] == 7
    best = load(tmp_path / 'ckpt_best.pt')
    assert (best['iter_num'], best['best_val_loss'].item()) == (4, 1.0)
    assert str(tmp_path / 'ckpt_best.pt') in capsys.readouterr().out


def test_a_second_interrupt_of_the_run_does_not_lose_the_best(tmp_path, at_step, val_losses):
    val_losses[4] = 1.0
    for i, stop in enumerate([6, 9]):
        at_step(stop, raise_signal(signal.SIGINT))
        run_train(tmp_path, **BEST_ONLY, init_from='resume' if i else 'scratch')
    assert load(tmp_path / 'ckpt_best.pt')['iter_num'] == 4 and load(tmp_path / 'ckpt.pt')['iter_num'] == 10


def test_a_better_one_after_resuming_takes_its_place(tmp_path, at_step, val_losses):
    val_losses |= {4: 1.0, 8: 0.5}
    at_step(6, raise_signal(signal.SIGINT))
    run_train(tmp_path, **BEST_ONLY)
    at_step(9, die)
    with pytest.raises(Died):
        run_train(tmp_path, **BEST_ONLY, init_from='resume')
    at_step(9, raise_signal(signal.SIGINT))
    run_train(tmp_path, **BEST_ONLY, init_from='resume')
    assert load(tmp_path / 'ckpt_best.pt')['iter_num'] == 8


def test_a_failed_save_on_interrupt_leaves_a_checkpoint_to_resume_from(tmp_path, at_step, val_losses, monkeypatch):
    val_losses[4] = 1.0
    run = run_train(tmp_path, **BEST_ONLY, max_iters=4)

    def full():
        monkeypatch.setattr(torch, 'save', lambda *a: (_ for _ in ()).throw(OSError('disk full')))
        os.kill(os.getpid(), signal.SIGINT)
    at_step(5, full)
    with pytest.raises(UserError, match='disk full'):
        run_train(tmp_path, **BEST_ONLY, init_from='resume')
    assert load(run.path)['iter_num'] == 4


# -- other people's checkpoints ---------------------------------------------------------------------------------------

def test_a_nanogpt_checkpoint_with_compile_prefixes_resumes(tmp_path, trained):
    """It has neither random numbers nor a data position nor a scaler, and its names carry `_orig_mod.`."""
    checkpoint = load(trained['vanilla'] / 'ckpt.pt')
    for key in ('rng', 'data_rng', 'scaler'):
        del checkpoint[key]
    checkpoint['model'] = {f'_orig_mod.{name}': x for name, x in checkpoint['model'].items()}
    torch.save(checkpoint, tmp_path / 'ckpt.pt')
    run = run_train(tmp_path, init_from='resume', max_iters=12)
    assert [row['iter'] for row in run.rows] == [10, 11, 12]
    assert not any(name.startswith('_orig_mod') for name in load(run.path)['model'])


def test_another_batch_size_resumes_too(tmp_path, trained):
    shutil.copytree(trained['vanilla'], tmp_path / 'out')
    rows = run_train(tmp_path / 'out', init_from='resume', batch_size=8, max_iters=12).rows
    assert [row['iter'] for row in rows] == list(range(13))


def test_dropout_may_be_changed_on_resume_and_the_shape_comes_from_the_checkpoint(tmp_path, trained):
    shutil.copytree(trained['vanilla'], tmp_path / 'out')
    run = run_train(tmp_path / 'out', init_from='resume', max_iters=12, dropout=0.3, n_layer=5, n_embd=64)
    args = load(run.path)['model_args']
    assert (args['dropout'], args['n_layer'], args['n_embd']) == (0.3, 2, 16)
