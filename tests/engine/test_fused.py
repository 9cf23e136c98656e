"""Blocks of captured steps: the kernel of Linear layers against float64, and how many kernels a
step launches."""
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from torch.utils._python_dispatch import TorchDispatchMode

from attention.backends import INTERPRETING, triton_enabled
from common.gpt_config import GPTConfig
from engine import native
from engine.pages.cache import PagedKVCache
from engine.steps.fused import FusedBlock, fuse
from engine.weights.linear import speed_up_on_cpu
from engine.weights.quantized import Int8Linear
from engine.steps.static import StaticCache
from engine.weights.quantize import quantize_weights
from model import LayerNorm
from tests.helpers.models import FULL_STACK, max_gap, random_model, tokens

pytest.importorskip('triton')
from attention.kernels import decode  # noqa: E402
from engine.steps import fused_linear as kernel  # noqa: E402

ACTIVATIONS = {'': lambda x: x, 'none': F.gelu, 'relu2': lambda x: F.relu(x).square(),
               'tanh': lambda x: F.gelu(x, approximate='tanh')}
interpreted = pytest.mark.skipif(not INTERPRETING, reason='interpreted where there is no GPU')


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('M, K, N, bias, norm, activation, residual', [
    (1, 48, 40, False, True, '', False), (1, 520, 16, True, False, '', True),
    (3, 80, 33, True, True, 'none', True), (8, 1040, 20, False, True, 'tanh', False),
    (9, 24, 17, True, False, 'relu2', True), (20, 200, 24, True, True, '', False),
    (33, 530, 70, True, True, 'tanh', False),
    (64, 16, 35, False, False, '', True)])
@torch.no_grad()
def test_a_layer_is_what_float64_gives(M, K, N, bias, norm, activation, residual, dtype, device,
                                       monkeypatch):
    torch.manual_seed(M)
    if M == 3:
        monkeypatch.setattr(kernel, 'PROGRAMS', 192)  # as on a GPU
    how = dict(dtype=dtype, device=device)
    linear = torch.nn.Linear(K, N, bias, **how)
    norm = LayerNorm(K, bias).to(**how) if norm else None
    for p in norm.parameters() if norm else ():
        p.normal_()
    x = 3 * torch.randn(M, K, device=device) + 20  # far from 0: the mean matters
    x = (x if M > 1 else 1e-3 * torch.randn_like(x)).to(dtype)  # so small that epsilon does
    residual = torch.randn(M, N, **how) if residual else None
    found = kernel.fused_linear(x, linear, norm, activation, residual).double()

    def wide(y):
        return None if y is None else y.double()
    y = wide(x)
    if norm:
        y = F.layer_norm(y, (K,), wide(norm.weight), wide(norm.bias))
    y = ACTIVATIONS[activation](F.linear(y, wide(linear.weight), wide(linear.bias)))
    y = y if residual is None else y + residual.double()
    error = (found - y).abs().max() / y.abs().max()
    # the inputs of the product and the result are rounded to `dtype`
    assert error < 4 * torch.finfo(dtype).eps if dtype != torch.float32 else error < 2e-6


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('M, K, N, norm', [(1, 520, 16, True), (5, 96, 33, False),
                                           (20, 64, 40, True), (40, 1040, 24, False)])
@torch.no_grad()
def test_a_layer_in_int8_is_what_int8_linear_gives(M, K, N, norm, dtype, device, monkeypatch):
    monkeypatch.setattr(native, 'library', lambda: None)  # not packed
    torch.manual_seed(M)
    how = dict(dtype=dtype, device=device)
    linear = Int8Linear(torch.nn.Linear(K, N, **how))
    norm = LayerNorm(K, True).to(**how) if norm else None
    x, residual = torch.randn(M, K, **how), torch.randn(M, N, **how)
    x[-1] *= 1e3  # each row has a scale of its own
    found = kernel.fused_linear(x, linear, norm, 'tanh', residual).double()
    y = x if norm is None else norm(x)
    expected = residual.double() + F.gelu(linear(y).double(), approximate='tanh')
    error = (found - expected).abs().amax(1) / expected.abs().amax(1)
    # one input in a hundred may be rounded to the next integer
    assert error.max() < (1e-2 if norm or dtype == torch.bfloat16 else 1e-5)
    assert error.median() < (2e-3 if dtype == torch.float32 else 1e-2)
    x[0, 3] = torch.nan
    for activation in ACTIVATIONS:
        found = kernel.fused_linear(x, linear, norm, activation, None)
        assert found[0].isnan().all() and found[1:].isfinite().all()
    zero = kernel.fused_linear(torch.zeros_like(x), linear)
    assert torch.equal(zero, linear.bias.expand(M, N).to(dtype))


@interpreted
@pytest.mark.parametrize('changes, quantized, fused', [
    ({}, '', True), (dict(bias=True, gelu='tanh'), '', True), (dict(gelu='relu2'), '', True),
    ({}, 'packed int8', False),
    (dict(bias=True, gelu='tanh'), 'int8', True), ({}, 'int4', False),
    (dict(attn_sink=True), '', False), (dict(attn_gate=True), '', False)])
@torch.inference_mode()
def test_which_blocks_are_fused(changes, quantized, fused, monkeypatch, recorded):
    """Whether they are or not, a step gives what a model without kernels gives."""
    shape = dict(FULL_STACK, n_layer=3, layer_pattern='LLG', kv_share='AAB')
    model = random_model(GPTConfig(**shape | changes), torch.float32)
    if quantized:
        if not quantized.startswith('packed'):
            monkeypatch.setattr(native, 'library', lambda: None)
        quantize_weights(model, quantized.split()[-1], 8)
    speed_up_on_cpu(model)  # as the engine does
    usual = model.new_cache(2, 20)
    model(tokens(2, 9), cache=usual)
    expected = model(tokens(2, 1), cache=usual)[0]
    cache = model.new_cache(2, 20)
    model(tokens(2, 9), cache=cache)
    fuse(model)
    view = StaticCache(cache, 2)
    view.set([9, 9])
    calls = recorded(kernel, 'fused_linear', lambda *args, **kwargs: args)
    with triton_enabled(True):
        found = model(tokens(2, 1), cache=view)[0]
    assert type(model.transformer.h[0]) is FusedBlock
    assert len(calls) == 4 * len(model.transformer.h) * fused
    assert max_gap(found, expected) < (1e-4 if not quantized else 5e-2)


def test_many_rows_are_left_to_torch():
    linear = torch.nn.Linear(8, 8)
    assert kernel.takes(torch.zeros(16, 8), linear)
    assert not kernel.takes(torch.zeros(17, 8), linear)
    assert not kernel.takes(torch.zeros(1, 8, dtype=torch.bfloat16), linear)
    assert not kernel.takes(torch.zeros(1, 8), type('Other', (torch.nn.Linear,), {})(8, 8))
    linear.weight = torch.nn.Parameter(torch.zeros(8, 8).T)
    assert not kernel.takes(torch.zeros(1, 8), linear)


class Launches(TorchDispatchMode):
    """Counts torch's operations that are not views, and launches of our kernels, which are left
    out."""
    FREE = ('view', 'empty', 'detach', 'dropout', 'promote_types')  # nothing runs on the device

    def __init__(self, monkeypatch):
        super().__init__()
        self.counts = Counter()
        for module, name in ((decode, '_split'), (decode, '_join'), (kernel, '_linear'),
                             (kernel, '_few_rows')):
            monkeypatch.setattr(module, name, self.kernel(name))

    def kernel(self, name):
        counts = self.counts

        class Kernel:
            def __getitem__(self, grid):
                return lambda *args, **kwargs: counts.update([name])
        return Kernel()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returned, name = function._schema.returns, function._schema.name
        view = any(r.alias_info and not r.alias_info.is_write for r in returned)
        if not view and not any(word in name for word in self.FREE):
            self.counts[name] += 1
        return function(*args, **kwargs or {})


@interpreted
@pytest.mark.parametrize('batch, kv_dtype, paged', [
    (1, 'float32', False), (1, 'int8', True), (8, 'int8', False), (16, 'int8', True)])
@torch.inference_mode()
def test_a_step_of_the_full_stack_launches_few_kernels(batch, kv_dtype, paged, monkeypatch):
    """12 layers, as on a GPU with 132 multiprocessors."""
    config = GPTConfig(**FULL_STACK | dict(n_layer=12, window_size=256, block_size=2048))
    model = random_model(config, torch.float32)
    pages = dict(cache_class=PagedKVCache, n_pages=32 * batch, page_size=64) if paged else {}
    cache = model.new_cache(batch, 2048, kv_dtype, **pages)
    cache.fill_(1000)
    for row in range(batch if paged else 0):
        cache.reserve(row, 1001)
    fuse(model)
    view, ids = StaticCache(cache, batch), torch.zeros(batch, 1, dtype=torch.int64)
    view.set([1000] * batch)
    monkeypatch.setattr(decode, '_n_processors', lambda device: 132)
    launches = Launches(monkeypatch)
    with triton_enabled(True):
        model(ids, cache=view)  # which makes the rotary table
        launches.counts.clear()
        with launches:
            model(ids, cache=view)
    assert launches.counts['_few_rows' if batch <= 8 else '_linear'] == 48
    assert launches.counts['_split'] == 12
    assert launches.counts['_join'] == 2  # of the two global layers
    assert launches.counts.total() <= 67, launches.counts
