"""Training with int8 matmuls: gradients close to float32's, and nothing else changed."""
import sys

import pytest
import torch

from config.errors import UserError
from tests.helpers.optim import backward, model_of
from training import int8_training
from training.device import autocast
from training.int8_training import train_in_int8


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def pair(bias=True):
    model, plain = model_of(bias), model_of(bias)
    train_in_int8(model)
    return model, plain


@pytest.mark.parametrize('bias', [True, False])
def test_gradients_are_near_those_of_float32(bias):
    model, plain = pair(bias)
    for m in (model, plain):
        backward(m, 0)
    gaps = {name: relative(p.grad, q.grad)
            for (name, p), q in zip(model.named_parameters(), plain.parameters())}
    assert 1e-4 < max(gaps.values()) < 0.05 and all(gap > 0 for gap in gaps.values())


def test_products_are_those_of_rounded_numbers():
    """A layer against its definition in float64: one scale per row of each factor."""
    torch.manual_seed(1)
    model, _ = pair()
    layer, x = model.transformer.h[0].mlp.c_fc, torch.randn(3, 5, 64, requires_grad=True)
    dy = torch.randn(3, 5, 256)
    layer(x).backward(dy)

    def rounded(a):
        scale = a.abs().amax(1, keepdim=True) / 127
        return (a / scale).round().double() * scale.double()
    flat, w, d = x.detach().view(15, 64), layer.weight.detach(), dy.view(15, 256)
    with torch.no_grad():
        y = layer(x).view(15, 256)
    torch.testing.assert_close(y.double(), rounded(flat) @ rounded(w).T + layer.bias.double(),
                               rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad.view(15, 64).double(),
                               rounded(d) @ rounded(w.T.contiguous()).T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.weight.grad.double(),
                               rounded(d.T.contiguous()) @ rounded(flat.T.contiguous()).T,
                               rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.bias.grad, d.sum(0))


def test_evaluation_and_checkpoints_know_nothing_of_it():
    model, plain = pair()
    idx = torch.arange(8)[None]
    assert not torch.equal(model(idx, idx)[0], plain(idx, idx)[0])
    assert torch.equal(model.eval()(idx, idx)[0], plain.eval()(idx, idx)[0])
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_under_autocast_its_outputs_are_halves():
    model, _ = pair()
    with autocast(torch.device('cpu'), torch.bfloat16):
        y = model.transformer.h[0].mlp.c_fc(torch.randn(1, 4, 64))
        backward(model, 0)
    assert y.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize('value', [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_lost(value):
    model, _ = pair()
    x = torch.randn(1, 4, 64)
    x[0, 1, 2] = value
    y = model.transformer.h[0].mlp.c_fc(x)
    assert not y[0, 1].isfinite().any() and y[0, [0, 2, 3]].isfinite().all()


@pytest.mark.parametrize('dtype, device',
                         [(torch.float16, 'cuda'), (torch.float16, 'cpu'), (torch.float32, 'mps')])
def test_where_it_cannot_serve(dtype, device):
    with pytest.raises(UserError, match='int8_training'):
        int8_training.check(dtype, torch.device(device))


def test_without_torchao_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'torchao.prototype.quantized_training', None)
    int8_training.int8_linear.cache_clear()
    with pytest.raises(UserError, match=r'int8_training=True needs the torchao.*\[int8\]'):
        train_in_int8(model_of())
