"""Optimizers, the size of their state, and schedules (runs: programs/test_train_settings.py)."""
import copy
from types import SimpleNamespace

import pytest
import torch

from model import GPT, GPTConfig
from tests.helpers.mechanisms import CHANGES, STACK
from tests.helpers.optim import assert_equal, backward, model_of, settings, step, weights
from training.step import optim
from training.step.optim import (
    cooldown, learning_rate_at, make_optimizer, set_learning_rate, state_bytes)
from training.step.update import GuardedUpdate


def guarded(optimizer, grad_clip):
    return GuardedUpdate(optimizer, torch.amp.GradScaler('cpu', enabled=False), grad_clip,
                         torch.device('cpu'))


# -- parameters of each optimizer

@pytest.mark.parametrize('model', [
    model_of(), GPT(GPTConfig(**STACK | CHANGES['many'] | dict(vocab_size=80)))],
    ids=['plain', 'sinks and latents'])
def test_muon_for_matrices_of_blocks_and_adamw_for_others_do_what_each_does_alone(model):
    twin = copy.deepcopy(model)
    optimizer = make_optimizer(model, settings(), 'cpu')
    parts = [[], [], []]
    for name, p in twin.named_parameters():
        parts[2 if p.dim() == 1 else 0 if '.h.' in name else 1].append(p)
    names = {id(p): name for each in (model, twin) for name, p in each.named_parameters()}
    assert [[names[id(p)] for p in group['params']] for group in optimizer.param_groups] == [
        [names[id(p)] for p in part] for part in parts]
    muon = torch.optim.Muon(parts[0], lr=3e-3, weight_decay=0.2, momentum=0.9,
                            adjust_lr_fn='match_rms_adamw')
    groups = [dict(params=parts[1], weight_decay=0.2), dict(params=parts[2], weight_decay=0.0)]
    adamw = torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.9))
    set_learning_rate(optimizer, 3e-3)
    for seed in range(3):
        step(model, optimizer, seed)
        backward(twin, seed)
        for each in (muon, adamw):
            each.step()
            each.zero_grad()
        assert_equal(weights(model), weights(twin))


def test_muon_in_float32_does_what_torchs_does_but_for_its_rounding(monkeypatch):
    """Also where few matrices go together."""
    monkeypatch.setattr(optim, 'TOGETHER', 64 * 64)
    monkeypatch.setattr(optim, 'multiplies_bfloat16', lambda: False)
    monkeypatch.setattr(torch.optim._muon, '_zeropower_via_newtonschulz',
                        lambda x, *how: optim.orthogonalized(x[None], *how)[0])
    models = [model_of(bias=False) for _ in range(2)]  # a bias of keys has rounding for gradients
    optimizers = [make_optimizer(model, settings(dtype=dtype), 'cpu')
                  for model, dtype in zip(models, ('auto', 'float32'))]
    assert [type(each.parts[0]) for each in optimizers] == [optim.BatchedMuon, torch.optim.Muon]
    assert [each.param_groups[-1]['fused'] for each in optimizers] == [True, None]
    for seed in range(3):
        for model, optimizer in zip(models, optimizers):
            step(model, optimizer, seed)
    found, wanted = map(weights, models)
    for name in found:
        torch.testing.assert_close(found[name], wanted[name], atol=2e-5, rtol=1e-4)
    states = [optimizer.state_dict()['state'] for optimizer in optimizers]
    assert [list(x) for x in states[0].values()] == [list(x) for x in states[1].values()]


@pytest.mark.parametrize('rows, columns', [(40, 16), (16, 40), (24, 24)])
def test_orthogonalization_is_what_float64_gives_and_in_bfloat16_what_torch_gives(rows, columns):
    """Also of matrices with small singular values, whose squares float32 does not hold."""
    torch.manual_seed(0)
    a, b, c = coefficients = (3.4445, -4.7750, 2.0315)
    low_rank = torch.randn(3, rows, 4) @ torch.randn(3, 4, columns)
    for x in (torch.randn(3, rows, columns), low_rank + 1e-3 * torch.randn(3, rows, columns)):
        u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
        s = s / s.norm(dim=1, keepdim=True)
        for _ in range(5):
            s = a * s + b * s ** 3 + c * s ** 5
        found = optim.orthogonalized(x, coefficients, 5, 1e-7)
        torch.testing.assert_close(found.double(), u @ s.diag_embed() @ vt, atol=2e-4, rtol=0)
    x, how = torch.randn(3, rows, columns), (coefficients, 5, 1e-7)
    wanted = torch.stack([torch.optim._muon._zeropower_via_newtonschulz(each, *how) for each in x])
    found = optim.orthogonalized(x, *how, bfloat16=True)
    torch.testing.assert_close(found, wanted.float(), atol=0.03, rtol=0)  # of about 0.15
    assert found.dtype == torch.float32


def test_an_embedding_in_a_block_is_not_orthogonalized():
    model = model_of()
    block = model.transformer.h[0]
    block.table, block.cube = torch.nn.Embedding(80, 64), torch.nn.Parameter(torch.ones(2, 3, 4))
    muon, decayed, _ = make_optimizer(model, settings(), 'cpu').param_groups
    for p in (block.table.weight, block.cube):
        assert any(p is q for q in decayed['params'])
        assert not any(p is q for q in muon['params'])


@pytest.mark.parametrize('name', ['adamw', 'muon'])
def test_the_bytes_of_a_state_are_foretold(name):
    model = model_of()
    optimizer = make_optimizer(model, settings(optimizer=name), 'cpu')
    parameters, gradients, state = state_bytes(model, name)
    backward(model, 0)
    assert gradients == parameters == sum(p.grad.nbytes for p in model.parameters())
    optimizer.step()
    assert state == sum(x.nbytes for each in optimizer.state.values() for x in each.values())
    low, high = {'adamw': (1, 1.01), 'muon': (0.45, 0.6)}[name]
    assert low <= state / state_bytes(model, 'adamw')[2] < high


@pytest.mark.parametrize('name', ['adamw', 'muon'])
def test_a_step_without_finite_gradients_changes_nothing(name):
    model = model_of()
    optimizer = make_optimizer(model, settings(optimizer=name), 'cpu')
    update = guarded(optimizer, 1.0)
    backward(model, 0)
    update(0, torch.tensor(1.0))
    before, state = weights(model), copy.deepcopy(optimizer.state_dict()['state'])
    backward(model, 1)
    model.lm_head.weight.grad[0, 0] = torch.nan
    update(1, torch.tensor(1.0))
    assert update.counts[0] == 1
    assert_equal(weights(model), before)
    assert str(optimizer.state_dict()['state']) == str(state)


@pytest.mark.parametrize('name', ['adamw', 'muon'])
def test_clipping_counts_all_gradients_together(name):
    """Clipping to a tenth gives the same result as gradients of a tenth."""
    moments = []
    for clip in (True, False):
        model = model_of()
        optimizer = make_optimizer(model, settings(optimizer=name), 'cpu')
        backward(model, 0)
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm()
                                                     for p in model.parameters()])).item()
        if not clip:
            for p in model.parameters():
                p.grad *= 0.1
        update = guarded(optimizer, norm / 10 if clip else 0.0)
        update(0, torch.tensor(1.0))
        assert update.read().grad_norm == pytest.approx(norm if clip else norm / 10, rel=1e-5)
        states = [optimizer.state[p] for g in optimizer.param_groups for p in g['params']]
        moments.append([state.get('momentum_buffer', state.get('exp_avg')) for state in states])
    for p, q in zip(*moments):  # Muon rounds its steps in bfloat16
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-9)


# -- learning rate

WSD = dict(lr_schedule='wsd', min_lr=0.2, cooldown_iters=40)


def rate(it, **changes):
    """nanoGPT's schedule, with 10 iterations of warmup and 100 of decay, unless it is changed."""
    s = dict(decay_lr=True, lr_schedule='cosine', learning_rate=1.0, min_lr=0.1, warmup_iters=10,
             lr_decay_iters=110)
    return learning_rate_at(it, SimpleNamespace(**s | changes))


@pytest.mark.parametrize('changes, rates', [
    ({}, {0: 1 / 11, 9: 10 / 11, 10: 1.0, 35: 0.1 + 0.45 * (1 + 2 ** -0.5), 60: 0.55, 110: 0.1,
          111: 0.1, 10 ** 6: 0.1}),
    (WSD, {0: 1 / 11, 9: 10 / 11, 10: 1.0, 70: 1.0, 71: 0.98, 109: 0.22, 110: 0.2, 10 ** 6: 0.2}),
    (dict(decay_lr=False), {0: 1.0, 999: 1.0}),
    (WSD | dict(decay_lr=False), {50: 1.0}),
    (dict(warmup_iters=5, lr_decay_iters=5), {4: 5 / 6, 5: 0.1, 6: 0.1}),
    (dict(warmup_iters=0), {0: 1.0})], ids=str)
def test_schedules(changes, rates):
    assert {it: rate(it, **changes) for it in rates} == pytest.approx(rates, rel=1e-12)


def test_the_decay_takes_a_fifth_unless_it_is_said():
    fifth = WSD | dict(cooldown_iters=0)
    assert rate(88, **fifth) == 1.0 > rate(89, **fifth)
    assert cooldown(SimpleNamespace(cooldown_iters=0, lr_decay_iters=3)) == 1
