"""Quantized weights: what the matmuls compute, how little logits change, where they are used."""
import pytest
import torch

from common.errors import UserError
from common.gpt_config import GPTConfig
from engine import native
from engine.engine import Engine
from engine.requests.params import SamplingParams
from engine.weights.quantized import Int4Linear, Int8Linear, quantize_groups, quantize_rows
from engine.weights.quantize import (
    compile_for_decode, quantize_weights, weight_bytes, weights_dtype)
from model import GPT
from tests.helpers.models import FULL_STACK, full_logits, random_model, tokens

WIDE = dict(FULL_STACK, n_embd=64, head_dim=16, mlp_hidden=128)


@pytest.fixture(params=[True, False], ids=['extension', 'torch'])
def native_on(request):
    if request.param and native.library() is None:
        pytest.skip('no compiler here')
    native.use(request.param)
    yield request.param
    native.use(True)


def model_with(weight_dtype='auto', **fields):
    model = random_model(GPTConfig(**WIDE | fields), torch.float32)
    quantize_weights(model, weight_dtype)
    return model


# -- one matmul ------------------------------------------------------------------------------------

def test_rows_are_quantized_to_half_a_step():
    x = torch.randn(5, 48) * torch.tensor([1e-6, 1, 1, 300, 0.0])[:, None]
    values, scale = quantize_rows(x)
    assert (values * scale - x).abs().amax(1).le(0.5001 * scale[:, 0]).all()
    assert values[:4].abs().amax(1).eq(127).all() and values[4].eq(0).all()


@pytest.mark.parametrize('bad', [torch.nan, torch.inf])
def test_rows_that_are_not_finite_stay_so(native_on, bad):
    linear, x = Int8Linear(torch.nn.Linear(32, 20)), torch.randn(3, 32)
    x[1, 7] = bad
    y = linear(x)
    assert y[[0, 2]].isfinite().all() and not y[1].isfinite().any()


@pytest.mark.parametrize('n_rows', [1, 3, 6, 7, 8, 9, 12, 13, 20, 33, 300])
@pytest.mark.parametrize('n_out, n_in', [(16, 64), (20, 64), (7, 12), (128, 4), (16, 60), (16, 30)])
def test_matmuls_equal_exact_sums_of_integers(native_on, n_rows, n_out, n_in):
    linear, x = torch.nn.Linear(n_in, n_out), torch.randn(n_rows, n_in)
    x_values, x_scale = quantize_rows(x)
    w_values, w_scale = quantize_rows(linear.weight.detach())
    sums = x_values.to(torch.int64) @ w_values.to(torch.int64).T
    expected = sums.double() * x_scale.double() * w_scale.double().T + linear.bias
    quantized = Int8Linear(linear)
    assert quantized.packed == (native_on and n_in % 4 == 0)
    assert ((quantized(x) - expected).abs() <= 1e-6 * (1 + expected.abs())).all()


@pytest.mark.parametrize('n_rows', [1, 3, 4, 9])
@pytest.mark.parametrize('n_out, n_in, group',
                         [(16, 64, 32), (20, 64, 16), (7, 24, 8), (128, 96, 96)])
def test_int4_matmuls_equal_exact_sums_by_group(native_on, n_rows, n_out, n_in, group):
    linear, x = torch.nn.Linear(n_in, n_out), torch.randn(n_rows, n_in)
    x_values, x_scale = quantize_rows(x)
    w_values, w_scale = quantize_groups(linear.weight.detach(), group)
    assert w_values.min() >= -8 and w_values.max() <= 7
    groups = w_values.double().view(n_out, -1, group) * w_scale.double()[:, :, None]
    expected = x_values.double() @ groups.flatten(1).T * x_scale.double() + linear.bias
    quantized = Int4Linear(linear, group)
    assert quantized.packed == native_on
    assert ((quantized(x) - expected).abs() <= 2e-6 * (1 + expected.abs())).all()
    assert (groups.flatten(1) - linear.weight).abs().max() <= 0.52 * w_scale.max()


def test_torchs_matmul_is_given_sizes_that_cuda_takes(recorded):
    """All three must be multiples of 8, and the vocabulary is any number."""
    model, idx = model_with(vocab_size=65), tokens(2, 30)
    quantize_weights(model, 'int8')
    expected = full_logits(model, idx)
    shapes = recorded(torch, '_int_mm', lambda a, b: b.shape)
    native.use(False)
    try:
        model = model_with(vocab_size=65)
        quantize_weights(model, 'int8')
        found = full_logits(model, idx)
    finally:
        native.use(True)
    sizes = [size for shape in shapes for size in shape]
    assert 72 in sizes and not any(size % 8 for size in sizes)
    assert found.shape == expected.shape and (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize('call, held, words', [
    *((lambda model, group=group: quantize_weights(model, 'int4', group), 'float32',
       f'int4_group={group}.*multiple of 8') for group in (0, 4, 12, 24, 48)),
    (compile_for_decode, 'int8', 'compile=True does not go with weights in int8')])
def test_what_is_refused_changes_nothing(call, held, words):
    model = model_with(held if held == 'int8' else 'auto')
    with pytest.raises(UserError, match=words):
        call(model)
    assert weights_dtype(model) == held


def test_widths_that_cuda_does_not_take_are_an_error_before_anything_changes(monkeypatch):
    model = model_with(mlp_hidden=100)
    monkeypatch.setattr(GPT, 'device', torch.device('cuda'))
    with pytest.raises(UserError, match='multiple of 8, and one is 100 wide'):
        quantize_weights(model, 'int8')
    assert weights_dtype(model) == 'float32' and isinstance(model.lm_head, torch.nn.Linear)


# -- whole models ----------------------------------------------------------------------------------

@pytest.mark.parametrize('kv_dtype', ['auto', 'int8'])
@pytest.mark.parametrize('dtype, name, bound',
                         [('int8', 'int8', 0.1), ('int4', 'int4, groups of 16', 0.3)])
def test_a_quantized_model_is_smaller_and_serves_its_own_tokens(native_on, dtype, name, bound,
                                                                kv_dtype):
    model, idx = model_with(), tokens(2, 30)
    plain, n_bytes = full_logits(model, idx), weight_bytes(model)
    quantize_weights(model, dtype, 16)
    assert weights_dtype(model) == name and isinstance(model.lm_head, Int8Linear)
    assert weight_bytes(model) < 0.32 * n_bytes
    assert 0 < (full_logits(model, idx) - plain).abs().mean() < bound * plain.std()
    engine = Engine(model, 2, 40, kv_dtype)
    params = SamplingParams(max_new_tokens=20, temperature=0)
    [done] = engine.generate([idx[0, :6].tolist()], params)
    assert bool(engine.fast_decode) == native_on
    if kv_dtype == 'auto':  # as without a cache
        text = torch.tensor([idx[0, :6].tolist() + done.tokens])
        assert full_logits(model, text)[0, 5:-1].argmax(-1).tolist() == done.tokens
    assert len(done.tokens) == 20


def test_a_subclass_of_linear_keeps_its_own_forward():
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)
    model = random_model(GPTConfig(**FULL_STACK), torch.float32)
    model.transformer.h[0].mlp.c_fc.__class__ = Doubled
    quantize_weights(model, 'int8')
    assert type(model.transformer.h[0].mlp.c_fc) is Doubled


def test_the_embedding_is_the_output_layers_matrix(native_on):
    model = model_with()
    exact = model.transformer.wte.weight.detach().clone()
    quantize_weights(model, 'int8')
    idx = torch.arange(len(exact))[None]
    rows = model.transformer.wte(idx)[0]
    assert ((rows - exact).abs() <= 0.501 * exact.abs().amax(1, keepdim=True) / 127).all()
    head = model.lm_head(torch.eye(64))  # unit vectors are exact in int8
    assert (head.T - rows).abs().max() < 1e-5


def test_mlps_alone_are_compiled(monkeypatch):
    model, compiled = model_with(), []
    monkeypatch.setattr(torch.nn.Module, 'compile', lambda self: compiled.append(self))
    compile_for_decode(model)
    assert compiled == [block.mlp for block in model.transformer.h]
