"""Interrupted and resumed training equals uninterrupted training, bit for bit on a CPU."""
import functools
import itertools
import os
import shutil
import signal

import numpy as np
import pytest
import torch

import sample
import train
from common.errors import UserError
from tests.helpers.mechanisms import CHANGES
from tests.programs.support import (
    NANOGPT_FORMS, FULL_STACK, HARD, TINY, VANILLA, assert_same_weights, contents, flags, load,
    losses, metrics, raise_signal, run_sample, run_train, start_program)
from training.loop.batches import TokenBatches


def evaluations(folder):
    return [(row['iter'], row['train_loss'], row['val_loss'])
            for row in metrics(folder) if 'val_loss' in row]


@pytest.fixture
def check_resume(tmp_path, at_step, final_weights):
    """Check that a run stopped in iteration `stop` and resumed has the same losses and weights."""
    def check(config, stop=7, then=(), **settings):
        settings = HARD | settings
        whole_dir, parts = tmp_path / 'whole', tmp_path / 'parts'
        run_train(whole_dir, config, **settings)
        whole = final_weights()
        at_step(stop, raise_signal(signal.SIGTERM))
        first = run_train(parts, config, **settings)
        assert load(first.path)['iter_num'] == stop + 1 and losses(parts)[-1][0] == stop
        torch._dynamo.reset()  # as in a new process
        torch.manual_seed(99)  # nothing may depend on the process's generator
        np.random.seed(99)
        run_train(parts, config, init_from='resume', **settings | dict(then))
        assert losses(parts) == losses(whole_dir)
        assert_same_weights(final_weights(), whole)
        if 'eval_interval' not in dict(then):
            assert evaluations(parts) == evaluations(whole_dir)
    return check


@pytest.mark.parametrize('config, settings', [
    (VANILLA, dict(stop=0, data_order='sequential', data_prefetch=0, grad_clip=0.0,
                   then=dict(data_prefetch=7))),
    (VANILLA, dict(stop=10, decay_lr=False, data_order='shuffled', data_prefetch=7,
                   dtype='float16', then=dict(data_prefetch=0))),
    (FULL_STACK, dict(recompute='block', then=dict(eval_interval=3, eval_iters=5))),
    (FULL_STACK | CHANGES['many'], dict(
        optimizer='muon', lr_schedule='wsd', recompute='selective', max_iters=9)),
    *(pytest.param(FULL_STACK | CHANGES[name], dict(
        optimizer='muon', max_iters=9, recompute=policy), id=name, marks=pytest.mark.slow)
      for name, policy in zip((name for name in CHANGES if name != 'many'),
                              itertools.cycle(('offload', 'mlp', 'every:3', 'sqrt'))))])
def test_resumed_is_uninterrupted(check_resume, config, settings):
    check_resume(config, **settings)


def test_the_loss_scale_goes_on_where_it_stood(check_resume, tmp_path, monkeypatch):
    """A scale that starts too high overflows, is halved, and must not start too high again."""
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0 ** 28)
    monkeypatch.setattr(torch.amp, 'GradScaler', scaler)
    check_resume(VANILLA, stop=12, dtype='float16')
    rows = metrics(tmp_path / 'parts')
    assert 2.0 ** 15 < rows[12]['loss_scale'] < 2.0 ** 28
    assert rows[12]['loss'] < rows[0]['loss'] - 0.1  # a working scale was found


def test_a_signal_during_an_evaluation_ends_it_without_a_partial_mean(
        tmp_path, capsys, monkeypatch):
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


@pytest.mark.parametrize('number', [
    signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_saves_and_exits_with_status_0(tmp_path, data_root, number):
    settings = FULL_STACK | dict(out_dir=tmp_path, max_iters=100000, lr_decay_iters=100000)
    process = start_program('train', *flags(settings), data_root=data_root)
    for line in process.stdout:
        if line.startswith('iter 3:'):
            process.send_signal(number)
            break
    rest, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, '')
    n = load(tmp_path / 'ckpt.pt')['iter_num']
    assert rest.splitlines()[-1] == (f'{number.name}: saved iteration {n} to {tmp_path}/ckpt.pt; '
                                     'go on with --init_from=resume')
    assert n > 3 and [i for i, _ in losses(tmp_path)] == list(range(n))
    assert contents(tmp_path).keys() - {'ckpt_best.pt'} == {'ckpt.pt', 'metrics.jsonl'}


class ClosedPipe:
    """A stdout whose reader is gone, like `tee` after Ctrl-C has ended the entire pipe."""

    def write(self, text):
        raise BrokenPipeError

    flush = isatty = lambda self: False


def test_an_interrupt_saves_although_the_log_has_no_reader(tmp_path, at_step, monkeypatch):
    def interrupt():
        monkeypatch.setattr('sys.stdout', ClosedPipe())
        os.kill(os.getpid(), signal.SIGINT)
    at_step(3, interrupt)
    run_train(tmp_path)
    assert load(tmp_path / 'ckpt.pt')['iter_num'] == 4


# -- other settings, other checkpoints -------------------------------------------------------------

def test_the_shape_comes_from_the_checkpoint_and_other_settings_from_today(tmp_path, capsys):
    trained_args = load(run_train(tmp_path, max_iters=5).path)['model_args']
    changed = dict(n_layer=5, bias=True, n_embd=64, block_size=8, mlp_hidden=31, qk_norm=True,
                   layer_pattern='LG', window_size=4, dropout=0.3, batch_size=8,
                   weight_decay=0.5, beta2=0.5, max_iters=6)
    file = tmp_path / 'changed.py'
    file.write_text(''.join(f'{name} = {value!r}\n' for name, value in (TINY | changed).items()))
    capsys.readouterr()
    train.main([str(file), f'--out_dir={tmp_path}', '--init_from=resume'])
    line, = (line for line in capsys.readouterr().out.splitlines() if ' (not ' in line)
    for words in ('n_layer = 2 (not 5)', 'block_size = 16 (not 8)', 'mlp_hidden = 0 (not 31)'):
        assert words in line
    checkpoint = load(tmp_path / 'ckpt.pt')
    args, config = checkpoint['model_args'], checkpoint['config']
    assert (args['dropout'], args['n_layer'], args['n_embd']) == (0.3, 2, 16)
    assert args == trained_args | {'dropout': 0.3}
    assert (config['n_layer'], config['bias']) == (2, False)
    decay, no_decay = checkpoint['optimizer']['param_groups']
    assert (decay['weight_decay'], no_decay['weight_decay']) == (0.5, 0.0)
    assert decay['betas'][1] == no_decay['betas'][1] == 0.5
    assert [row['iter'] for row in metrics(tmp_path)] == list(range(7))


@pytest.mark.parametrize('program, last', [
    (train, '--init_from=resume'), (sample, '--report=False')])
def test_all_typed_settings_that_the_model_does_not_have_are_named(
        tmp_path, trained, capsys, program, last):
    """Keys of the file yield to the checkpoint; keys typed after it are an error."""
    file = tmp_path / 'config.py'
    file.write_text(''.join(f'{name} = {value!r}\n'
                            for name, value in (TINY | dict(qk_norm=True)).items()))
    shutil.copytree(trained['vanilla'], tmp_path / 'out')
    typed = '--n_layer=5', '--mlp_hidden=31'
    with pytest.raises(UserError) as caught:
        program.main([str(file), f'--out_dir={tmp_path}/out', *typed, last])
    message = str(caught.value)
    assert all(flag in message for flag in typed) and 'qk_norm=' not in message


@pytest.mark.parametrize('form', NANOGPT_FORMS)
def test_a_nanogpt_checkpoint_samples_the_same_and_resumes(tmp_path, trained, form, capsys):
    """It has no random states, data position or scaler, other names, and its optimizer may not be
    fused."""
    checkpoint = load(trained['vanilla'] / 'ckpt.pt')
    theirs = ('model', 'optimizer', 'model_args', 'iter_num', 'best_val_loss', 'config')
    checkpoint, ours = {key: checkpoint[key] for key in theirs}, checkpoint['model']
    checkpoint['model'] = NANOGPT_FORMS[form](ours)
    for group in checkpoint['optimizer']['param_groups']:
        group['fused'] = None
    torch.save(checkpoint, tmp_path / 'ckpt.pt')
    texts = [run_sample(capsys, out_dir=folder, report=False).rpartition('meta.pkl')[2]
             for folder in (tmp_path, trained['vanilla'])]
    assert texts[0] == texts[1] and 'ab' in texts[0]
    run = run_train(tmp_path, init_from='resume', max_iters=12)
    assert [row['iter'] for row in run.rows] == [10, 11, 12]
    saved = load(run.path)
    assert saved['model'].keys() == ours.keys()
    assert all(group['fused'] for group in saved['optimizer']['param_groups'])


@pytest.mark.parametrize('settings, optimizer', [
    ({}, None), ({}, 'absent'), ({'block_size': 8}, {})])
def test_a_checkpoint_without_an_optimizer_resumes_with_a_note(
        tmp_path, trained, optimizer, settings, capsys):
    checkpoint = load(trained['vanilla'] / 'ckpt.pt') | {'optimizer': optimizer}
    if optimizer == 'absent':
        del checkpoint['optimizer']
    torch.save(checkpoint, tmp_path / 'ckpt.pt')
    run = run_train(tmp_path, init_from='resume', max_iters=12, **settings)
    assert run.rows[-1]['iter'] == 12
    assert 'has no state of an optimizer, which starts anew' in capsys.readouterr().out
