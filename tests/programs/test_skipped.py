"""Iterations with a non-finite loss or gradient: they are skipped and counted, or end the run."""
import copy
import math
import re
import signal

import pytest
import torch

import train
from common.errors import UserError
from tests.programs.support import assert_same_weights, load, metrics, raise_signal, run_train


def bad_gradient(run, value, name='transformer.h.0.ln_1.weight'):
    """Add `value` to one element of one gradient."""
    poison = torch.zeros_like(run.model.get_parameter(name))
    poison[3] = value
    return run.model.get_parameter(name).register_hook(lambda g: g + poison)


def bad_loss(run, value):
    return run.model.register_forward_hook(lambda model, given, out: (out[0], out[1] + value))


@pytest.fixture
def poisoned(monkeypatch):
    """`poisoned({iteration: act})`: act(run) returns a hook for that step. Returns a dictionary
    that is filled during the run: iteration -> the states before and after."""
    plain, acts, seen = train.Run.step, {}, {}

    def state(run):
        weights = {name: x.clone() for name, x in run.model.state_dict().items()}
        return weights, copy.deepcopy(run.optimizer.state_dict())

    def step(run):
        if run.iter_num not in acts:
            return plain(run)
        before, hook = state(run), acts[run.iter_num](run)
        try:
            return plain(run)
        finally:
            hook.remove()
            seen[run.iter_num] = before, state(run)
            assert all(p.grad is None for p in run.model.parameters())
    monkeypatch.setattr(train.Run, 'step', step)

    def poison(actions):
        acts.update(actions)
        return seen
    return poison


def assert_unharmed(before, after):
    assert_same_weights(before[0], after[0])
    assert before[1]['state'].keys() == after[1]['state'].keys()
    for index, moments in before[1]['state'].items():
        assert_same_weights(moments, after[1]['state'][index])


@pytest.mark.parametrize('act, value, dtype', [
    (bad_gradient, math.nan, 'float32'), (bad_gradient, math.inf, 'float16'),
    (bad_gradient, 1e30, 'float32'),  # its norm overflows
    (bad_gradient, math.inf, 'not clipped'),
    (bad_loss, math.nan, 'float16'), (bad_loss, -math.inf, 'float32')])
def test_a_bad_iteration_is_skipped_and_the_run_goes_on(
        tmp_path, capsys, monkeypatch, poisoned, act, value, dtype):
    seen, more = poisoned({4: lambda run: act(run, value)}), dict(dtype=dtype)
    if dtype == 'not clipped':
        plain, more = torch.optim.AdamW, dict(grad_clip=0.0)
        monkeypatch.setattr(torch.optim, 'AdamW', lambda *args, fused, **kw: plain(*args, **kw))
    rows = run_train(tmp_path, max_iters=10, gradient_accumulation_steps=2, **more).rows
    assert_unharmed(*seen[4])
    assert [row['skipped'] for row in rows] == [0] * 4 + [1] * 7
    assert rows[4]['grad_norm'] is None and (rows[4]['loss'] is None) == (act is bad_loss)
    assert all(row['grad_norm'] > 0 for row in rows if row['iter'] != 4)
    assert all(math.isfinite(row['loss']) for row in rows[5:])
    assert rows[-1]['loss'] < rows[0]['loss']
    scale = '; loss scale now 32768' if dtype == 'float16' else ''
    lines = re.findall('^skipped.*|^iter [45]', capsys.readouterr().out, re.M)
    assert lines == [
        'iter 4', f'skipped iteration 4: loss or gradients were not finite{scale}', 'iter 5']


def test_thin_logs_and_the_end_of_a_run_report_all_skipped(tmp_path, capsys, at_step, poisoned):
    """A resumed run counts on."""
    poisoned({it: lambda run: bad_gradient(run, math.nan) for it in (1, 2, 6, 9, 10)})
    at_step(11, raise_signal(signal.SIGINT))
    rows = run_train(tmp_path, max_iters=20, eval_interval=100, log_interval=4).rows
    assert [row['skipped'] for row in rows][:3] == [0, 2, 3]
    told = re.findall('^skipped (.*):', capsys.readouterr().out, re.M)
    assert told == ['2 iterations, the last of them 2', 'iteration 6',
                    '2 iterations, the last of them 10']
    assert load(tmp_path / 'ckpt.pt')['skipped'] == 5
    poisoned({14: lambda run: bad_gradient(run, math.nan)})
    rows = run_train(tmp_path, init_from='resume', log_interval=4, eval_interval=100).rows
    assert [(row['iter'], row['skipped']) for row in rows[3:]] == [(12, 5), (16, 6), (20, 6)]


@pytest.mark.parametrize('act, settings, steps, words', [
    (lambda run: bad_gradient(run, math.inf), {}, (2, 3, 5, 12, 13, 14), (
        r'iteration 14: the gradient norm is inf \(loss \d\.\d{4}\), and 3 iterations in a row',
        r'learning rate 0\.00\d+, last finite loss \d\.\d{4}\.', 'ckpt.pt has the',
        'lower learning_rate.*grad_clip below 1, dtype=bfloat16')),
    (lambda run: bad_loss(run, math.nan), dict(grad_clip=0.0), (0, 1, 2), (
        'iteration 2: the loss is nan', 'no loss was finite yet', 'nothing has been saved',
        r'grad_clip=1 \(it is off\)'))], ids=['later', 'from the start'])
def test_so_many_in_a_row_end_the_run_with_what_to_do(
        tmp_path, poisoned, act, settings, steps, words):
    seen = poisoned(dict.fromkeys(steps, act))
    with pytest.raises(UserError, match='.*'.join(words)):
        run_train(tmp_path, max_skipped=3, **settings)
    assert_same_weights(seen[steps[-3]][0][0], seen[steps[-1]][1][0])
    assert (tmp_path / 'ckpt.pt').exists() == (steps[0] > 0)
    assert not steps[0] or load(tmp_path / 'ckpt.pt')['iter_num'] == 10


def test_halvings_of_the_loss_scale_do_not_end_a_run_but_overflows_at_1_do(tmp_path, poisoned):
    """65536 is halved 16 times until it is 1; only later iterations count."""
    poisoned({it: lambda run: bad_gradient(run, math.inf) for it in range(40)})
    message = 'iteration 18: .*3 iterations in a row.*loss scale 0.125'
    with pytest.raises(UserError, match=message):
        run_train(tmp_path, dtype='float16', max_skipped=3, max_iters=40, eval_interval=100)
    rows = metrics(tmp_path)
    assert [row['loss_scale'] for row in rows] == [2.0 ** (15 - it) for it in range(18)]
    assert [row['skipped'] for row in rows] == list(range(1, 19))
