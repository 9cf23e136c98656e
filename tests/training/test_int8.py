"""Training in int8, and for int8 weights: products round, gradients stay close to float32's, and
nothing else changes."""
import copy
import sys

import pytest
import torch
from torch.nn import Linear
from torch.nn import functional as F

from config.errors import UserError
from engine.weights.quantize import quantize_weights
from kv.int8_rows import quantize_rows
from model import GPTConfig
from tests.helpers.mechanisms import CHANGES, STACK
from tests.helpers.models import random_model, tokens
from tests.helpers.optim import backward, model_of
from training import int8_training
from training.device import autocast
from training.int8_forward import RoundedLinear, train_for_int8
from training.int8_training import train_in_int8

CLAMPED = dict(STACK, act_clamp=1.0, kv_quant_train='int8', bias=True)
BOTH = pytest.mark.parametrize('change', [train_for_int8, train_in_int8])


def changed(model, change=train_in_int8):
    change(model)
    return model


def rounding(config):
    return changed(random_model(GPTConfig(**config), torch.float32), train_for_int8)


# -- both

@BOTH
@pytest.mark.parametrize('bias, dtype, bound', [
    (True, torch.float32, 0.05), (False, torch.float32, 0.05), (True, torch.bfloat16, 0.3)])
def test_gradients_are_near_those_of_float32_and_outputs_halves_under_autocast(
        change, bias, dtype, bound):
    model, plain = changed(model_of(bias), change), model_of(bias)
    with autocast(torch.device('cpu'), dtype):
        y = model.transformer.h[0].mlp.c_fc(torch.randn(1, 4, 64))
        backward(model, 0)
    backward(plain, 0)
    assert y.dtype == dtype and all(p.grad.dtype == torch.float32 for p in model.parameters())
    gaps = [((p.grad - q.grad).norm() / q.grad.norm()).item()
            for p, q in zip(model.parameters(), plain.parameters())]
    assert 1e-4 < max(gaps) < bound and min(gaps) > 0


@BOTH
@pytest.mark.parametrize('value', [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_lost(change, value):
    layer, x = changed(model_of(), change).transformer.h[0].mlp.c_fc, torch.randn(1, 4, 64)
    x[0, 1, 2] = value
    y = layer(x)
    assert not y[0, 1].isfinite().any() and y[0, [0, 2, 3]].isfinite().all()


# -- the products in int8

def test_products_are_those_of_rounded_numbers():
    """A layer against its definition in float64: one scale per row of each factor."""
    torch.manual_seed(1)
    layer = changed(model_of()).transformer.h[0].mlp.c_fc
    x = torch.randn(3, 5, 64, requires_grad=True)
    dy = torch.randn(3, 5, 256)
    layer(x).backward(dy)

    def rounded(a):
        scale = a.abs().amax(1, keepdim=True) / 127
        return (a / scale).round().double() * scale.double()
    flat, w, d = x.detach().view(15, 64), layer.weight.detach(), dy.view(15, 256)
    for found, wanted in (
            (layer(x).detach().view(15, 256), rounded(flat) @ rounded(w).T + layer.bias.double()),
            (x.grad.view(15, 64), rounded(d) @ rounded(w.T).T),
            (layer.weight.grad, rounded(d.T) @ rounded(flat.T).T)):
        torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.bias.grad, d.sum(0))


def test_where_it_cannot_serve_and_what_to_install(monkeypatch):
    for dtype, device in ((torch.float16, 'cpu'), (torch.float32, 'mps')):
        with pytest.raises(UserError, match='int8_training'):
            int8_training.check(dtype, torch.device(device))
    monkeypatch.setitem(sys.modules, 'torchao.prototype.quantized_training', None)
    int8_training.int8_linear.cache_clear()
    with pytest.raises(UserError, match=r'int8_training=True needs the torchao.*\[int8\]'):
        train_in_int8(model_of())


# -- rounded for an engine with int8 weights

@pytest.mark.parametrize('config, native', [
    (STACK, True), (CLAMPED, False), (STACK | CHANGES['latents'], True)],
    ids=['full stack', 'clamp and int8 KV, without the extension', 'latents'])
def test_the_blocks_are_those_of_the_quantized_engine(config, native, monkeypatch):
    if not native:
        monkeypatch.setattr('engine.native.library', lambda: None)
    model = rounding(config)
    plain = random_model(GPTConfig(**config), torch.float32)
    engine = copy.deepcopy(plain)
    quantize_weights(engine, 'int8')
    engine.lm_head, engine.transformer.wte = plain.lm_head, plain.transformer.wte
    idx = tokens(2, 40)
    with torch.no_grad():
        ours, theirs, unrounded = (m(idx, all_logits=True)[0] for m in (model, engine, plain))
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    assert (ours - unrounded).abs().max() > 1e-3 * theirs.abs().max()
    again, losses = model.train()(idx, idx), engine(idx, idx)
    assert again[1].item() == pytest.approx(losses[1].item(), rel=1e-5)


@pytest.mark.parametrize('bias', [True, False])
def test_gradients_are_straight_through(bias):
    """Those of autograd for x + (rounded - x).detach(), and the same for the weight."""
    torch.manual_seed(0)
    layer = Linear(12, 20, bias=bias)
    x, dy = torch.randn(2, 5, 12, requires_grad=True), torch.randn(2, 5, 20)

    def straight_through(a):
        values, scale = quantize_rows(a.detach().flatten(0, -2))
        return a + ((values * scale).view_as(a) - a).detach()
    expected = F.linear(straight_through(x), straight_through(layer.weight), layer.bias)
    inputs = [x, *layer.parameters()]
    wanted = torch.autograd.grad(expected, inputs, dy)
    layer.__class__ = RoundedLinear
    found = layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(found, inputs, dy), wanted):
        assert a.shape == b.shape and (a - b).abs().max() <= 1e-5


@pytest.mark.slow
def test_compiled_for_int8():
    torch._dynamo.reset()
    model, idx = rounding(CLAMPED).train(), tokens(2, 20)
    loss = model(idx, idx)[1]
    loss.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    again = torch.compile(model, backend='aot_eager', fullgraph=True)(idx, idx)[1]
    again.backward()
    assert again.item() == pytest.approx(loss.item(), rel=1e-5)
    for p, grad in zip(model.parameters(), wanted):
        torch.testing.assert_close(p.grad, grad, rtol=1e-3, atol=1e-4)
