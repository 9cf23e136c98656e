"""Iterations whose loss or gradients are not finite: skipped, counted, harmless, and the end of a run that has only those."""
import copy
import json
import math
import os
import re
import signal

import pytest
import torch

import train
from config.errors import UserError
from tests.programs.support import assert_same_weights, load, losses, metrics, run_train


def bad_gradient(run, value, name='transformer.h.0.ln_1.weight'):
    """Poisons one element of one gradient."""
    poison = torch.zeros_like(run.model.get_parameter(name))
    poison[3] = value
    return run.model.get_parameter(name).register_hook(lambda g: g + poison)


def bad_loss(run, value):
    return run.model.register_forward_hook(lambda model, given, out: (out[0], out[1] + value))


@pytest.fixture
def poisoned(monkeypatch):
    """`poisoned({iteration: a function of the run that leaves a hook})`; gives what each of these steps found and left."""
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
    return lambda actions: (acts.update(actions), seen)[1]


def assert_unharmed(before, after):
    assert_same_weights(before[0], after[0])
    assert before[1]['state'].keys() == after[1]['state'].keys()
    for index, moments in before[1]['state'].items():
        assert_same_weights(moments, after[1]['state'][index])


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
@pytest.mark.parametrize('act', [lambda run: bad_gradient(run, math.nan), lambda run: bad_gradient(run, math.inf),
                                 lambda run: bad_loss(run, math.nan), lambda run: bad_loss(run, -math.inf)],
                         ids=['gradient nan', 'gradient inf', 'loss nan', 'loss inf'])
def test_a_bad_iteration_harms_nothing_and_the_run_goes_on(tmp_path, capsys, poisoned, act, dtype):
    seen = poisoned({4: act})
    rows = run_train(tmp_path, max_iters=10, dtype=dtype, gradient_accumulation_steps=2).rows
    assert_unharmed(*seen[4])
    assert [row['skipped'] for row in rows] == [0] * 4 + [1] * 7
    assert rows[4]['grad_norm'] is None and all(row['grad_norm'] > 0 for row in rows if row['iter'] != 4)
    assert all(math.isfinite(row['loss']) for row in rows[5:]) and rows[-1]['loss'] < rows[0]['loss']
    scale = '; loss scale now 32768' if dtype == 'float16' else ''
    told = re.findall('^skipped.*|^iter [45]', capsys.readouterr().out, re.M)
    assert told == ['iter 4', f'skipped iteration 4: loss or gradients were not finite{scale}', 'iter 5']


def test_with_clipping_off_and_without_a_fused_optimizer(tmp_path, poisoned, monkeypatch):
    plain = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, 'AdamW', lambda *args, fused, **kw: plain(*args, **kw))
    seen = poisoned({4: lambda run: bad_gradient(run, math.inf)})
    rows = run_train(tmp_path, max_iters=6, grad_clip=0.0).rows
    assert_unharmed(*seen[4])
    assert [row['skipped'] for row in rows] == [0] * 4 + [1] * 3


def test_a_norm_that_overflows_is_skipped_though_each_gradient_is_finite(tmp_path, poisoned):
    seen = poisoned({4: lambda run: bad_gradient(run, 1e30)})
    run_train(tmp_path, max_iters=5)
    assert_unharmed(*seen[4])


def test_without_skipped_iterations_the_guard_changes_no_bit(tmp_path, monkeypatch):
    """Against the loop that does not look: the same losses and norms to the last bit."""
    guarded = run_train(tmp_path / 'a', max_iters=6).rows

    def plainly(update, iter_num, loss):
        torch.nn.utils.clip_grad_norm_([p for group in update.optimizer.param_groups for p in group['params']], 1.0)
        update.optimizer.step()
        update.optimizer.zero_grad(set_to_none=True)
    monkeypatch.setattr('training.update.GuardedUpdate.__call__', plainly)
    monkeypatch.setattr('training.run.propagate_nonfinite', lambda loss: loss)
    run_train(tmp_path / 'b', max_iters=6)
    assert [(row['iter'], row['loss']) for row in guarded] == losses(tmp_path / 'b')


def test_thin_logs_tell_of_all_that_were_skipped(tmp_path, capsys, poisoned):
    poisoned({it: lambda run: bad_gradient(run, math.nan) for it in (1, 2, 6)})
    rows = run_train(tmp_path, max_iters=8, eval_interval=100, log_interval=4).rows
    assert [row['skipped'] for row in rows] == [0, 2, 3]
    assert re.findall('^skipped.*', capsys.readouterr().out, re.M) == [
        'skipped 2 iterations, the last of them 2: loss or gradients were not finite',
        'skipped iteration 6: loss or gradients were not finite']


@pytest.mark.parametrize('bad, told', [((5,), 'iteration 5'), ((5, 6), '2 iterations, the last of them 6'), ((4,), None)])
@pytest.mark.parametrize('stopped', [False, True], ids=['to its end', 'stopped'])
def test_the_end_of_a_run_tells_of_those_skipped_since_the_last_log_line(tmp_path, capsys, poisoned, stopped, bad, told):
    poisoned({it: lambda run: bad_gradient(run, math.nan) for it in bad})
    if stopped:
        poisoned({7: lambda run: (os.kill(os.getpid(), signal.SIGINT), bad_gradient(run, 0.0))[1]})
    run_train(tmp_path, max_iters=20 if stopped else 7, eval_interval=100, log_interval=4 if told else 1)
    lines = re.findall('^skipped.*|^SIGINT: saved', capsys.readouterr().out, re.M)
    told = told or 'iteration 4'
    assert lines == [f'skipped {told}: loss or gradients were not finite'] + ['SIGINT: saved'] * stopped


@pytest.mark.parametrize('act, what', [(lambda run: bad_gradient(run, math.inf), r'gradient norm is inf \(loss \d\.\d{4}\)'),
                                       (lambda run: bad_loss(run, math.nan), 'loss is nan')])
def test_so_many_in_a_row_end_the_run_with_what_to_do(tmp_path, poisoned, act, what):
    seen = poisoned({it: act for it in (2, 3, 5, 12, 13, 14)})
    with pytest.raises(UserError) as caught:
        run_train(tmp_path, max_skipped=3)
    message = str(caught.value)
    assert '\n' not in message
    assert re.match(rf'iteration 14: the {what}, and 3 iterations in a row were skipped', message), message
    assert re.search(rf'learning rate 0\.00\d+, last finite loss \d\.\d{{4}}\..*{re.escape(str(tmp_path))}.*ckpt.pt has the',
                     message), message
    assert all(text in message for text in ('lower learning_rate', 'grad_clip below 1', 'dtype=bfloat16'))
    assert load(tmp_path / 'ckpt.pt')['iter_num'] == 10
    assert_unharmed(seen[12][0], seen[14][1])


def test_a_run_that_is_broken_from_the_start_says_so(tmp_path, poisoned):
    poisoned({it: lambda run: bad_loss(run, math.nan) for it in range(9)})
    with pytest.raises(UserError, match='iteration 1: the loss is nan.*no loss was finite yet.*nothing has been saved.*'
                                        r'grad_clip=1 \(it is off\)'):
        run_train(tmp_path, max_skipped=2, grad_clip=0.0)


def test_halvings_of_the_first_loss_scale_do_not_end_a_run_but_overflows_without_scaling_do(tmp_path, poisoned, capsys):
    """65536 is halved 16 times until it is 1; only from there on iterations count."""
    poisoned({it: lambda run: bad_gradient(run, math.inf) for it in range(40)})
    with pytest.raises(UserError, match='iteration 18: .*3 iterations in a row.*loss scale 0.125'):
        run_train(tmp_path, dtype='float16', max_skipped=3, max_iters=40, eval_interval=100)
    rows = metrics(tmp_path)
    assert [row['loss_scale'] for row in rows] == [2.0 ** (15 - it) for it in range(18)]
    assert [row['skipped'] for row in rows] == list(range(1, 19))
    assert 'skipped iteration 17: loss or gradients were not finite; loss scale now 0.25' in capsys.readouterr().out


def test_counts_go_on_where_a_run_was_stopped(tmp_path, poisoned):
    poisoned({it: lambda run: bad_gradient(run, math.nan) for it in (3, 12)})
    poisoned({7: lambda run: (os.kill(os.getpid(), signal.SIGINT), bad_gradient(run, 0.0))[1]})
    run_train(tmp_path, log_interval=6)
    assert load(tmp_path / 'ckpt.pt')['skipped'] == 1
    poisoned({7: lambda run: bad_gradient(run, 0.0)})
    rows = run_train(tmp_path, init_from='resume', log_interval=6).rows
    assert [(row['iter'], row['skipped']) for row in rows] == [(0, 0), (6, 1), (10, 1), (12, 2), (18, 2), (20, 2)]


def test_what_is_not_finite_is_null_in_the_metrics(tmp_path, poisoned):
    poisoned({2: lambda run: bad_loss(run, math.nan)})
    run_train(tmp_path, max_iters=3)

    def refuse(name):
        raise ValueError(f'{name} is no JSON')
    rows = [json.loads(line, parse_constant=refuse) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert rows[2]['loss'] is None and rows[2]['grad_norm'] is None and rows[3]['loss'] > 0


def test_max_skipped_is_at_least_one(tmp_path):
    with pytest.raises(UserError, match='max_skipped=0: must be at least 1'):
        run_train(tmp_path / 'out', max_skipped=0)
    assert not (tmp_path / 'out').exists()
