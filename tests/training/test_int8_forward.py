"""Training for int8 weights: the forward pass is the quantized engine's, gradients pass through."""
import copy

import pytest
import torch
from torch.nn import Linear
from torch.nn import functional as F

from engine.weights.quantize import quantize_weights
from kv.int8_rows import quantize_rows
from model import GPT, GPTConfig
from tests.helpers.mechanisms import CHANGES, STACK
from tests.helpers.models import random_model, tokens
from training.device import autocast
from training.int8_forward import RoundedLinear, train_for_int8

CLAMPED = dict(STACK, act_clamp=1.0, kv_quant_train='int8', bias=True)


def rounding(config, seed=0):
    model = random_model(GPTConfig(**config), torch.float32, seed)
    train_for_int8(model)
    return model


def linears(model):
    return [m for m in model.transformer.h.modules() if isinstance(m, Linear)]


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


def test_every_matrix_of_blocks_rounds_and_nothing_else_changes():
    model = rounding(STACK)
    assert len(linears(model)) == 4 * 7
    assert all(type(m) is RoundedLinear for m in linears(model))
    assert type(model.lm_head) is Linear
    plain = GPT(GPTConfig(**STACK))
    assert {name: x.shape for name, x in model.state_dict().items()} == {
        name: x.shape for name, x in plain.state_dict().items()}
    plain.load_state_dict(model.state_dict())  # a checkpoint has no more tensors


def test_inputs_are_clamped_before_they_are_rounded():
    """An outlier would otherwise set the scale of its token."""
    limit = 0.5
    model = rounding(dict(STACK, act_clamp=limit))
    layer = model.transformer.h[0].mlp.c_fc
    x = torch.randn(3, 24)
    x[:, 0] = 1000
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x.clamp(-limit, limit)))
        gap = (layer(x) - F.linear(x.clamp(-limit, limit), layer.weight, layer.bias)).abs().max()
    assert gap < 0.02


def test_under_autocast_outputs_are_halves_and_gradients_float32():
    model = rounding(STACK).train()
    idx = tokens(2, 20)
    with autocast(torch.device('cpu'), torch.bfloat16):
        assert model.transformer.h[0].mlp.c_fc(torch.randn(1, 4, 24)).dtype == torch.bfloat16
        loss = model(idx, idx)[1]
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    half = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(idx, idx)[1].backward()
    apart = [((a - p.grad).norm() / p.grad.norm()).item() for a, p in zip(half, model.parameters())]
    assert max(apart) < 0.3


@pytest.mark.parametrize('value', [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_lost(value):
    layer, x = rounding(STACK).transformer.h[0].mlp.c_fc, torch.randn(1, 4, 24)
    x[0, 1, 2] = value
    y = layer(x)
    assert not y[0, 1].isfinite().any() and y[0, [0, 2, 3]].isfinite().all()


@pytest.mark.slow
def test_compiled():
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
