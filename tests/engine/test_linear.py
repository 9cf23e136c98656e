"""The road that few rows take through a Linear: the same product."""
import pytest
import torch
from torch import nn

from engine.linear import FewRowsLinear


def chunked(monkeypatch) -> list:
    """Gets an entry whenever a product is made in chunks of the weight."""
    taken, in_chunks = [], FewRowsLinear._in_chunks
    monkeypatch.setattr(FewRowsLinear, '_in_chunks', lambda layer, x: taken.append(x.shape) or in_chunks(layer, x))
    return taken


@pytest.mark.parametrize('bias', [False, True])
@pytest.mark.parametrize('n_out', [64, 65, 128, 200])
@pytest.mark.parametrize('shape', [(4, 1, 24), (15, 1, 24), (2, 3, 24), (7, 24)])
def test_few_rows_equal_a_plain_linear(monkeypatch, shape, n_out, bias):
    layer, x = FewRowsLinear(24, n_out, bias=bias), torch.randn(shape)
    expected = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    taken = chunked(monkeypatch)
    with torch.no_grad():
        y = layer(x)
    assert len(taken) == 1
    assert y.shape == expected.shape and y.is_contiguous() and (y - expected).abs().max() < 1e-5


@pytest.mark.parametrize('n_rows, n_out, dtype', [
    (1, 64, torch.float32), (2, 64, torch.float32), (3, 64, torch.float32), (16, 64, torch.float32), (8, 63, torch.float32),
    (8, 64, torch.float64), (8, 64, torch.bfloat16)])
def test_others_take_the_plain_road(monkeypatch, n_rows, n_out, dtype):
    layer, taken, x = FewRowsLinear(24, n_out).to(dtype), chunked(monkeypatch), torch.randn(n_rows, 24, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert not taken


def test_training_takes_the_plain_road_and_is_differentiable():
    layer = FewRowsLinear(24, 64)
    layer(torch.randn(8, 24)).sum().backward()
    assert layer.weight.grad is not None
