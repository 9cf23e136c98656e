"""Kernels and decode steps in GPT-2's shape with all savings, in bfloat16, on a GPU. Without one,
the same tests run in a tiny shape in float32, with interpreted kernels."""
import copy
import statistics
import time

import pytest
import torch

from attention.backends import triton_enabled
from attention.cached import dequantized
from attention.rope import RotaryTable, norm_and_rotate
from common.gpt_config import GPTConfig
from engine import native
from engine.steps.captured import CapturedDecode
from engine.pages.cache import PagedKVCache
from engine.requests.params import SamplingParams
from engine.weights.quantized import Int8Linear, quantize_rows
from engine.steps.static import put
from kv.cache import KVCache
from kv.slots import KVStore
from lab.benchmarks.kernels import fill_random
from tests.helpers.models import SHORT_STACK, random_model

pytest.importorskip('triton')
from attention.kernels.decode import New, stored_attention  # noqa: E402
from engine.steps.fused_linear import fused_linear  # noqa: E402
from lab.scripts import gpu_times  # noqa: E402

# dtype of the arithmetic -> largest error, relative to a row's largest value
ALLOWED = {torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
D = 64


@pytest.fixture
def real(device):
    torch.manual_seed(0)
    return device.type == 'cuda'


@pytest.fixture
def dtype(real):
    return torch.bfloat16 if real else torch.float32  # the interpreter has no bfloat16


@pytest.fixture
def unpacked(monkeypatch):
    """On a CPU, int8 weights would be packed for the extension, which the kernels do not read."""
    monkeypatch.setattr(native, 'library', lambda: None)


def full_model(real, parameters=None):
    if real:
        return gpu_times.full_model(parameters)
    return random_model(GPTConfig(**SHORT_STACK), torch.float32)


def error(found, exact) -> float:
    """The largest error of any row (first dimension), relative to the row's largest exact value.
    Means over many keys are small: next to those over few keys, their errors would be invisible.
    Where an exact row is zero, the result must be zero."""
    off, size = (x.double().flatten(1).abs().amax(1) for x in (found.double() - exact, exact))
    return (off / size.clamp(min=1e-30)).nan_to_num(torch.inf).max().item()


def random_store(rows, capacity, kv_dtype, dtype, device) -> KVStore:
    store = KVStore(rows, 1, capacity, D, getattr(torch, kv_dtype), dtype, device)
    fill_random(store)
    return store


def test_errors_of_small_rows_count():
    exact = torch.tensor([[100.0, 1.0], [1e-3, 0.0], [0.0, 0.0]])
    assert error(exact + torch.tensor([[1.0], [0], [0]]), exact) == pytest.approx(1e-2)
    assert error(exact + torch.tensor([[0], [1e-3], [0]]), exact) == pytest.approx(1)
    assert error(exact + torch.tensor([[0], [0], [1e-9]]), exact) > 1
    assert error(exact * torch.nan, exact) == torch.inf


@pytest.mark.parametrize('layout', ['contiguous', 'ring', 'paged', 'chunk', 'paged chunk'])
@pytest.mark.parametrize('kv_dtype', ['bfloat16', 'int8', 'float16', 'float32'])
def test_attention(device, real, dtype, kv_dtype, layout):
    """Rows of many lengths, one of them empty; the kernel chooses the number of splits."""
    B, H, page = 8, 12, 64
    S, W = (8192, 256) if real else (128, 16)
    t = 5 if 'chunk' in layout else 1
    generator = torch.Generator().manual_seed(0)
    lengths = [S, 0, t, S - 1, *torch.randint(t, S, (B - 4,), generator=generator)]
    kv_lens = torch.tensor(lengths).to(device)
    dtype = getattr(torch, kv_dtype) if kv_dtype.startswith('float') else dtype
    q = torch.randn(B, t, H, D, device=device, dtype=dtype).transpose(1, 2)
    table, window = None, 0
    if 'paged' in layout:
        n_pages = B * S // page
        store = random_store(n_pages + 3, page, kv_dtype, dtype, device)
        order = torch.randperm(n_pages + 3, generator=generator)[:n_pages]
        table = order.view(B, -1).to(device, torch.int32)
        k, v = (x[table.long()].transpose(1, 2).flatten(2, 3)
                for x in dequantized(torch.float64, *store.tensors))
    else:
        store = random_store(B, W if layout == 'ring' else S, kv_dtype, dtype, device)
        k, v = dequantized(torch.float64, *store.tensors)
    if layout == 'ring':
        kv_lens, window = kv_lens.clamp(max=W), W
    y = stored_attention(q, *store.tensors, kv_lens=kv_lens, window=window, table=table)

    last = kv_lens[:, None] - t + torch.arange(t, device=device)   # (B, t)
    seen = torch.arange(k.size(2), device=device) <= last[..., None]
    scores = q.double() @ k.transpose(2, 3) * D ** -0.5
    exact = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num(0.0) @ v
    assert error(y, exact) < ALLOWED[dtype]


@pytest.mark.parametrize('kv_dtype', ['bfloat16', 'int8', 'none'])
@torch.inference_mode()
def test_write(device, real, dtype, kv_dtype):
    """QK-norm, RoPE, int8, the write of K and V and attention in one kernel, against the kernel of
    attention after the others in torch. 'none': a layer without its own K and V."""
    B, H, S = 64 if real else 3, 12, 256
    owns = kv_dtype != 'none'
    qkv = torch.randn(B, 1, H + 2 * owns, D, device=device, dtype=dtype)
    q_norm = torch.nn.RMSNorm(D, 1e-6, device=device, dtype=dtype)
    norms = q_norm, torch.nn.RMSNorm(D, 1e-6, device=device, dtype=dtype)
    for norm in norms:
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    rows = torch.arange(B, device=device)
    rope = RotaryTable(D, 10000.0).at(rows[:, None] * 37, 37 * B, dtype)
    store = random_store(B, S, kv_dtype if owns else 'int8', dtype, device)
    plain, places = copy.deepcopy(store), rows * 5 % S
    lens = torch.full_like(rows, S)
    new = New(H, *norms, rope, *((rows, places, True) if owns else ()))
    y = stored_attention(qkv, *store.tensors, kv_lens=lens, new=new)
    if owns:
        k, v = qkv.transpose(1, 2)[:, H:].chunk(2, dim=1)
        put(plain, rows, places, plain.encode(norm_and_rotate(k, norms[1], rope), v))
    q = norm_and_rotate(qkv.transpose(1, 2)[:, :H], norms[0], rope)
    rounds_well = real or kv_dtype != 'bfloat16'  # the interpreter rounds to it towards 0
    assert error(y, stored_attention(q, *plain.tensors, kv_lens=lens)) < (
        ALLOWED[dtype] if rounds_well else 1e-2)
    for stored, x in zip(*(dequantized(torch.float64, *s.tensors) for s in (store, plain))):
        assert error(stored, x) < 2e-2


@pytest.mark.parametrize('rows', [1, 16, 32, 64])
@pytest.mark.parametrize('int8', [False, True], ids=['float', 'int8'])
@torch.inference_mode()
def test_linear_layers(device, real, dtype, unpacked, int8, rows):
    """The Linear layers of a decode step, with what surrounds them, against float64; with int8
    weights, against torch."""
    shape = (768, 3840) if real else (48, 80)
    for case in gpu_times.linear_cases(rows, device, dtype, shape, int8).values():
        exact = case if int8 else (copy.deepcopy(x).double() if hasattr(x, 'double') else x
                                   for x in case)
        assert error(fused_linear(*case), gpu_times.plain_linear(*exact).double()) < ALLOWED[dtype]


@torch.inference_mode()
def test_int8_output_layer(device, real, dtype, unpacked):
    """GPT-2's vocabulary of 50,257 is no multiple of 8, which CUDA's int8 matmul requires."""
    C = 768 if real else 48
    head = torch.nn.Linear(C, 50257, bias=False, device=device, dtype=dtype)
    x = torch.randn(3, C, device=device, dtype=dtype)
    (values, scale), (weights, weight_scale) = quantize_rows(x), quantize_rows(head.weight)
    sums = values.double() @ weights.double().T
    assert error(Int8Linear(head)(x), sums * scale * weight_scale.T) < ALLOWED[dtype]


@pytest.mark.parametrize('kv_dtype, layout', [
    ('auto', 'contiguous'), ('int8', 'paged'),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ('auto', 'paged'), ('int8', 'contiguous'), ('int8', 'compiled')])])
@torch.inference_mode()
def test_captured_steps(device, real, kv_dtype, layout):
    """Logits of steps at two batch sizes, in float32, against plain torch without any kernel. In
    int8 another order of summation may round a value to the next integer, so that only the median
    error over the steps is small."""
    if layout == 'compiled' and not real:
        pytest.skip('Dynamo cannot trace interpreted kernels')
    torch.set_float32_matmul_precision('highest')
    model = full_model(real, torch.float32)
    room, n_steps = (600, 5) if real else (40, 1)
    sizes = (1, 64) if real else (3,)
    for batch in sizes[-1:] if layout == 'compiled' else sizes:  # compiling takes a minute
        pages = dict(n_pages=batch * room // 4, page_size=16) if layout == 'paged' else {}
        kind = PagedKVCache if layout == 'paged' else KVCache
        plain = model.new_cache(batch, room, kv_dtype, kind, **pages)
        caches = plain, model.new_cache(batch, room, kv_dtype, kind, **pages)
        prompt = torch.randint(model.config.vocab_size, (batch, room // 2), device=device)
        for cache in caches:
            with triton_enabled(False):
                model(prompt, cache=cache)
        decode = CapturedDecode(model, caches[0], compiled=layout == 'compiled')
        errors = []
        for step in range(n_steps):
            tokens = prompt[:, step:step + 1]
            for row in range(batch if layout == 'paged' else 0):
                caches[0].reserve(row, caches[0].length(row) + 1)
            found = decode(tokens).clone()
            with triton_enabled(False):
                plain = model(tokens, cache=caches[1])[0][:, -1].double()
            errors.append(error(found, plain))
        assert statistics.median(errors) < 1e-3
        assert max(errors) < (1e-3 if kv_dtype == 'auto' else 5e-2)


@torch.inference_mode()
def test_engines_give_the_same_texts(device, real):
    """The asynchronous engine and the synchronous one, with all kinds of sampling in a batch."""
    n = 256 if real else 8
    mixed = [dict(temperature=0), dict(), dict(top_p=0.9), dict(top_k=40, logprobs=2),
             dict(repetition_penalty=1.3), dict(temperature=0.5), dict(min_p=0.01), dict()]
    with triton_enabled(real):
        model = full_model(real)
        for kinds in ([dict()] * 8, mixed):
            params = [SamplingParams(n, seed=k, **kind) for k, kind in enumerate(kinds)]
            first, second = (gpu_times.engine_texts(model, params, asynchronous)[0]
                             for asynchronous in (True, False))
            assert len(first) == 8 and first == second


@torch.inference_mode()
def test_no_plan_is_built_for_each_length_of_a_prompt(device, real):
    """cuDNN's attention would build one for each exact length, in tens of milliseconds."""
    with triton_enabled(real):
        model, seconds = full_model(real), []
        for length in [99, *range(100, 140)] * 2 if real else [3, 4, 3, 4]:
            cache = model.new_cache(1, length)
            began = time.perf_counter()
            logits = model(torch.ones(1, length, dtype=torch.long, device=device), cache=cache)[0]
            assert logits.isfinite().all()  # waits for the device
            seconds.append(time.perf_counter() - began)
    first, second = seconds[:len(seconds) // 2][1:], seconds[len(seconds) // 2:][1:]
    if real:
        assert statistics.median(first) < statistics.median(second) + 5e-3
