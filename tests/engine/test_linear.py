"""Linear layers with few rows: the extension's matmul and torch's give the same result."""
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from engine import native
from engine.weights import linear
from engine.weights.linear import FewRowsLinear

pytestmark = pytest.mark.skipif(native.library() is None, reason='no compiler here')


@pytest.fixture
def by_extension(monkeypatch, recorded) -> list:
    """Shapes that the extension multiplied; it is declared to be faster up to 8 rows."""
    monkeypatch.setattr(linear, '_measured', lambda dtype: 8)
    return recorded(linear, 'by_extension', lambda described, x: x.shape)


@pytest.mark.parametrize('dtype, error', [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize('n_out, bias', [(16, False), (65, True)])
@pytest.mark.parametrize('shape', [(1, 48), (2, 1, 48), (2, 3, 48), (8, 48)])
def test_few_rows_equal_a_plain_linear(by_extension, shape, n_out, bias, dtype, error):
    """Also once their weight has changed or been replaced."""
    layer, x = FewRowsLinear(shape[-1], n_out, bias=bias).to(dtype), torch.randn(shape).to(dtype)
    other = nn.Parameter(torch.full_like(layer.weight, 0.1))
    for change in (lambda: None, lambda: layer.weight.mul_(2),
                   lambda: setattr(layer, 'weight', other)):
        with torch.no_grad():
            change()
            y = layer(x)
        bias = None if layer.bias is None else layer.bias.double()
        expected = nn.functional.linear(x.double(), layer.weight.double(), bias)
        assert y.dtype == dtype and y.shape == expected.shape and y.is_contiguous()
        assert (y - expected).abs().max() < error
    assert len(by_extension) == 3


def described(weight, bias=None):
    n_out, n_in = weight.shape
    return linear.describe(SimpleNamespace(weight=weight, bias=bias, out_features=n_out,
                                           in_features=n_in))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('n_out', [1, 8, 16, 65])
@pytest.mark.parametrize('n_in', [8, 48, 1040, 8192])
def test_any_number_of_rows(n_in, n_out, dtype):
    weight, bias = torch.randn(n_out, n_in).to(dtype), torch.randn(n_out)
    for n_rows in (1, 2, 3, 4, 15, 16, 17, 19, 20, 32, 47, 50, 64, 83):
        x = torch.randn(n_rows, n_in).to(dtype)
        y = linear.by_extension(described(weight, bias), x)
        expected = x.double() @ weight.double().T + bias
        size = x.double().abs() @ weight.double().abs().T + bias.abs()  # a sum may be near 0
        assert ((y - expected).abs() <= 1e-6 * size).all(), n_rows


@pytest.mark.parametrize('n_rows', [1, 3, 4, 17, 19, 35])
def test_bfloat16_weights_take_all_rows_rounded_to_nearest_or_none(n_rows):
    """Some processors multiply bfloat16 by bfloat16: then all activations are rounded."""
    x, weight = torch.rand(n_rows, 1024), torch.rand(16, 1024).bfloat16()
    y = linear.by_extension(described(weight), x)
    forms = (form.double() @ weight.double().T for form in (x, x.bfloat16()))
    assert min(((y - form) / form).abs().max() for form in forms) < 1e-6


@pytest.mark.parametrize('n_rows, n_in, dtype', [(9, 48, torch.float32), (4, 20, torch.float32),
                                                 (4, 48, torch.float64), (4, 48, torch.float16)])
def test_torch_computes_the_rest_and_training(by_extension, n_rows, n_in, dtype):
    layer, x = FewRowsLinear(n_in, 64).to(dtype), torch.randn(n_rows, n_in, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    layer = FewRowsLinear(48, 64)
    layer(torch.randn(4, 48)).sum().backward()
    assert layer.weight.grad is not None and not by_extension


@pytest.mark.parametrize('most, rows', [(0, 0), (4, 4), (63, 16), (256, sys.maxsize)])
def test_rows_up_to_which_it_is_faster(monkeypatch, most, rows):
    monkeypatch.setattr(linear, '_is_fast', lambda dtype, n: n <= most)
    assert linear._measured.__wrapped__(torch.float32) == rows


@pytest.mark.parametrize('cpu, tiles, suits', [(1.2, False, True), (1.4, False, False),
                                               (1.4, True, True)])
@pytest.mark.parametrize('waits', ['extension', 'torch'])
def test_other_programs_do_not_change_what_computes_prompts(monkeypatch, waits, cpu, tiles, suits):
    """Whichever side waits for cores. cpu: the extension's CPU time over torch's."""
    taken, n_threads = {'extension': cpu, 'torch': 1}, torch.get_num_threads()
    spent = []

    def call(name, *args):
        assert torch.get_num_threads() == 1  # so that no thread waits for another
        time.sleep(0.01 if name == waits else 0)
        spent.append(taken[name])

    monkeypatch.setattr(linear, 'by_extension', partial(call, 'extension'))
    monkeypatch.setattr(linear, 'F', SimpleNamespace(linear=partial(call, 'torch')))
    monkeypatch.setattr(time, 'thread_time', lambda: sum(spent))
    monkeypatch.setattr(native.library(), 'tiles', tiles)
    assert linear.suits_prompts.__wrapped__(torch.bfloat16) == suits
    assert torch.get_num_threads() == n_threads
