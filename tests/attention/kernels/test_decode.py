"""The attention kernel against dense attention in float64, for every input a cache can give it."""
import math
import re

import pytest
import torch

from attention.backends import triton_enabled
from attention.cached import cached_attention, dequantize, kernel_takes
from attention.kernels import decode
from attention.kernels.decode import Tuning, split_blocks, stored_attention
from common.gpt_config import GPTConfig
from engine.pages.cache import PagedKVCache
from kv.quantize import quantize_int8
from tests.helpers.models import FULL_STACK, random_model, tokens
from tests.helpers.reference import visible

# error allowed for half-precision weights and outputs
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def stored(shape, dtype, device, seed=0, spread=1.0):
    """K or V as a cache stores it, and its values in float64."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread
    if dtype == torch.int8:
        values, scale = quantize_int8(x)
        return (values.to(device), scale.to(device)), dequantize(values, scale, torch.float64)
    return (x.to(device, dtype),), x.to(dtype).double()


def attend(q, k, v, **how):
    """Run the kernel on K and V, each given as (values,) or (values, scales)."""
    return stored_attention(q, k[0], v[0], *(x[1] for x in (k, v) if len(x) == 2), **how)


def dense(q, k, v, seen):
    """Attention in float64; `seen` is (B, t, S) bool. Queries that see no key give zeros."""
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def queries(B, H, t, D, dtype, device, seed=9):
    q = torch.randn(B, t, H, D, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return q.transpose(1, 2).to(device), q.transpose(1, 2)  # not contiguous, as in the model


def inputs(device, shape, stored_shape, kv_dtype, dtype=torch.float32, spread=1.0):
    """Queries (B, H, t, D) on the device and on the CPU; K and V as stored and in float64."""
    return (*queries(*shape, dtype, device), *stored(stored_shape, kv_dtype, device, 1),
            *stored(stored_shape, kv_dtype, device, 2, spread))


def off(y, expected):
    return (y.double().cpu() - expected).abs().max().item()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('kv_dtype', [None, torch.int8, torch.float32])
def test_half_precision(device, dtype, kv_dtype):
    q, q_cpu, k, k64, v, v64 = inputs(
        device, (2, 6, 1, 64), (2, 2, 200, 64), kv_dtype or dtype, dtype)
    y = attend(q, k, v, tuning=Tuning(n_splits=2))
    assert y.dtype == dtype
    everything = torch.ones(2, 1, 200, dtype=torch.bool)
    assert off(y, dense(q_cpu, k64, v64, everything)) < TOLERANCE[dtype]


@pytest.mark.parametrize('spread', [1e-5, 1e-2, 300.0])
def test_int8_values_of_any_size_in_half_precision(device, spread):
    """In float16, weights times scales would be subnormal or overflow if the scales were not
    divided by the largest one."""
    q, q_cpu, k, k64, v, v64 = inputs(
        device, (1, 4, 1, 32), (1, 1, 100, 32), torch.int8, torch.float16, spread=spread)
    expected = dense(q_cpu, k64, v64, torch.ones(1, 1, 100, dtype=torch.bool))
    y = attend(q.float(), k, v)
    assert off(y, expected) < 2e-5 * spread
    # the smallest step of the output's dtype
    assert off(attend(q, k, v), expected) < 3e-3 * max(spread, 2e-5)


@pytest.mark.parametrize('t', [1, 3])
@pytest.mark.parametrize('kv_dtype', [torch.float32, torch.int8])
def test_rows_of_different_lengths(device, kv_dtype, t, monkeypatch):
    """Values after a row's keys, even NaN, have no effect; a row without keys gives zeros. Empty
    splits of short rows beside a long one are neither written nor read."""
    lengths, n_joined = torch.tensor([300, 0, 1, 33]), []
    q, q_cpu, k, k64, v, v64 = inputs(device, (4, 4, t, 16), (4, 2, 300, 16), kv_dtype)
    for b, n in enumerate(lengths):
        for x in (k, v):
            x[-1][b, :, n:] = torch.nan  # the scales, if the dtype is int8
    empty = torch.Tensor.new_empty

    def unwritten(x, *shape, **how):
        if len(shape) == 1:  # the interpreter's
            return empty(x, *shape, **how)
        n_joined.append(shape[1])
        return empty(x, *shape, **how).fill_(torch.nan)
    monkeypatch.setattr(torch.Tensor, 'new_empty', unwritten)
    seen = torch.arange(300) <= (lengths[:, None] - t + torch.arange(t))[..., None]
    for n_splits in (1, 5):
        y = attend(q, k, v, kv_lens=lengths.to(device, torch.int32),
                   tuning=Tuning(n_splits=n_splits))
        assert off(y, dense(q_cpu, k64, v64, seen)) < 2e-5
        assert not y[1].any()
    assert n_joined == [1, 5, 5]


# which blocks are skipped depends on the window, not on the heads: with many heads, which take
# long, the default tests have both ends of a block and one key of the next
ALL_WINDOWS, SOME_WINDOWS = range(10, 30, 3), (10, 13, 28)
FEW_HEADS, MANY_HEADS = (4, 4), (12, 1)


@pytest.mark.parametrize('heads, t, n_keys, window, block_n', [
    *((heads, *chunk, 0) for heads in (FEW_HEADS, MANY_HEADS)
      for chunk in ((5, 40, 0), (5, 40, 7), (9, 40, 3), (40, 40, 20))),
    *((FEW_HEADS, 9, 100, window, 16) for window in ALL_WINDOWS),
    *((MANY_HEADS, 9, 100, window, 16) for window in SOME_WINDOWS),
    *(pytest.param(MANY_HEADS, 9, 100, window, 16, marks=pytest.mark.slow)
      for window in ALL_WINDOWS if window not in SOME_WINDOWS)])
def test_chunks_in_order(device, heads, t, n_keys, window, block_n):
    """The last t keys belong to the queries' own tokens. Key blocks before the first visible key
    are skipped, and no later ones."""
    H, n_kv_head = heads
    q, q_cpu, k, k64, v, v64 = inputs(device, (2, H, t, 16), (2, n_kv_head, n_keys, 16), torch.int8)
    seen = visible(n_keys, window)[n_keys - t:].expand(2, t, n_keys)
    # the interpreter takes a second to join 100 rows
    for n_splits in (1, 2) if t < 40 else (1,):
        y = attend(q, k, v, window=window, tuning=Tuning(block_n, n_splits))
        assert off(y, dense(q_cpu, k64, v64, seen)) < 2e-5


@pytest.mark.parametrize('kv_dtype', [torch.float32, torch.int8])
def test_padding_that_counts_past_the_keys_looks_at_none(device, kv_dtype):
    """A row of 10 keys gets a chunk of 4 with 2 padding tokens: values after the keys may be NaN,
    so giving them a weight of 0 is not enough."""
    q, q_cpu, k, k64, v, v64 = inputs(device, (1, 4, 4, 16), (1, 1, 12, 16), kv_dtype)
    v[-1][:, :, 10:] = torch.nan
    k, v = (tuple(x[:, :, :10] for x in kv) for kv in (k, v))
    k64, v64 = k64[:, :, :10], v64[:, :, :10]
    y = attend(q, k, v, kv_lens=torch.tensor([12], device=device))[:, :, :2]
    order = torch.arange(10) <= 8 + torch.arange(2)[:, None]
    assert off(y, dense(q_cpu[:, :, :2], k64, v64, order[None])) < 2e-5


@pytest.mark.parametrize('t', [1, 3])
@pytest.mark.parametrize('page_size, block_n', [(4, 0), (16, 0), (32, 16)])
@pytest.mark.parametrize('kv_dtype', [torch.float32, torch.int8])
def test_pages(device, t, page_size, block_n, kv_dtype):
    """Rows of 37, 3 and 20 keys, in pages scattered over the pool."""
    lengths = torch.tensor([37, 3, 20])
    n_pages = -(-37 // page_size)
    pages = torch.randperm(3 * n_pages + 2, generator=torch.Generator().manual_seed(3))
    table = pages[:3 * n_pages].view(3, n_pages)
    q, q_cpu, k, k64, v, v64 = inputs(
        device, (3, 6, t, 16), (len(pages), 2, page_size, 16), kv_dtype)
    # (B, Hkv, n_pages * page_size, D)
    k64, v64 = (x[table].transpose(1, 2).flatten(2, 3) for x in (k64, v64))
    seen = torch.arange(k64.size(2)) <= (lengths[:, None] - t + torch.arange(t))[..., None]
    for n_splits in (1, 3):
        y = attend(q, k, v, table=table.to(device, torch.int32), kv_lens=lengths.to(device),
                   tuning=Tuning(block_n, n_splits))
        assert off(y, dense(q_cpu, k64, v64, seen)) < 2e-5


@pytest.mark.parametrize('page_size', [4, 16])
@pytest.mark.parametrize('kv_dtype', [torch.float32, torch.int8])
def test_padding_that_counts_past_the_pages_of_a_row_looks_at_none(device, page_size, kv_dtype):
    """Page -1 would be memory before the pool: it must not be read, even with a weight of 0."""
    q, q_cpu, k, k64, v, v64 = inputs(device, (2, 4, 8, 16), (4, 1, page_size, 16), kv_dtype)
    v[-1][0] = torch.nan
    k, v = (tuple(x[1:] for x in kv) for kv in (k, v))
    table = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32, device=device)
    # of row 1, the last 3 tokens are padding
    seen = torch.tensor([2 * page_size, page_size + 3], device=device)
    y = attend(q, k, v, table=table, kv_lens=seen)[1, :, :-3]
    order = torch.arange(page_size) <= page_size - 5 + torch.arange(5)[:, None]
    assert off(y, dense(q_cpu[1:, :, :5], k64[3:], v64[3:], order[None])[0]) < 2e-5


@pytest.mark.parametrize('D', [8, 16, 48, 80, 128, 256])
def test_any_head_dim(device, D):
    q, q_cpu, k, k64, v, v64 = inputs(device, (1, 3, 2, D), (1, 1, 50, D), torch.float32)
    seen = torch.ones(2, 50, dtype=torch.bool).tril(48)[None]
    assert off(attend(q, k, v), dense(q_cpu, k64, v64, seen)) < 2e-5


def emulated(ptx: str, given: int) -> int:
    """The 32 bits that a program of `_int8_to_bfloat16` or `_int8_to_float16` makes of 32 bits."""
    bits = {'$1': given}

    def halves(x, dtype):
        return torch.tensor([x & 0xffff, x >> 16], dtype=torch.uint16).view(dtype)
    for line in re.findall(r'(?<=; )([a-z][^;]*);', ptx):
        operation, *args = re.split(r'[ ,]+', line.strip())
        target, values = args[0], [bits.get(x, x) for x in args[1:]]
        values = [int(x, 0) if isinstance(x, str) else x for x in values]
        if operation == 'mov.b32':
            [result] = values
        elif operation == 'shr.u32':
            result = values[0] >> values[1]
        elif operation == 'lop3.b32':  # a table: bit 4a + 2b + c of the last is the result
            a, b, c, outcomes = values
            result = sum((outcomes >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i
                         for i in range(32))
        elif operation in ('fma.rn.bf16x2', 'sub.f16x2'):
            dtype = torch.bfloat16 if 'bf16' in operation else torch.float16
            numbers = [halves(x, dtype).double() for x in values]
            a, b = numbers[:2]
            exact = a - b if operation == 'sub.f16x2' else a * b + numbers[2]
            low, high = exact.to(dtype).view(torch.uint16).tolist()
            result = low | high << 16
        else:
            raise NotImplementedError(operation)
        bits[target] = result
    return bits['$0']


@pytest.mark.parametrize('convert, dtype', [(decode._int8_to_bfloat16, torch.bfloat16),
                                            (decode._int8_to_float16, torch.float16)])
def test_assembly_converts_every_int8_exactly(convert, dtype):
    for n in range(-128, 128):
        bytes_ = torch.tensor([n, 5, -7, 127 - n & 127], dtype=torch.int8)
        word = int.from_bytes(bytes_.view(torch.uint8).tolist(), 'little')
        for first, shift in ((0, 0), (1, 8)):
            assert '\n' not in convert(shift)  # which Inductor of torch 2.11 does not bear
            made = emulated(convert(shift), word)
            found = torch.tensor([made & 0xffff, made >> 16], dtype=torch.uint16).view(dtype)
            assert found.tolist() == bytes_[first::2].tolist()


@pytest.mark.parametrize('n_programs, S, decoding, block_n, num_warps, expected', [
    (1, 100, True, 64, 4, 256), (1, 256, True, 128, 2, 256),
    (1, 8192, True, 128, 2, 256), (1, 32768, True, 64, 1, 512),  # of 64 splits
    (64, 8192, True, 128, 2, 512), (256, 8192, True, 128, 2, 1024),
    (256, 8192, False, 64, 4, 4096), (4096, 2 ** 17, True, 64, 1, 2048),
    (4096, 10 ** 5, False, 64, 4, 100032), (1, 10 ** 6, True, 64, 4, 15680)])
def test_lengths_of_splits(n_programs, S, decoding, block_n, num_warps, expected, monkeypatch):
    """At least 256 keys and, when decoding, at most 1,024 if 64 of them are enough."""
    monkeypatch.setattr(decode, '_n_processors', lambda device: 132)
    n = split_blocks(n_programs, S, decoding, block_n, num_warps, torch.device('cpu'))
    assert n * block_n == expected and -(-S // expected) <= 64


def test_what_it_serves(monkeypatch):
    """No float64, no odd widths of int8, and the CPU only if that is requested."""
    served = []
    monkeypatch.setattr(decode, 'stored_attention', lambda q, *_, **__: served.append(q.dtype) or q)
    half, double = (torch.zeros(1, 1, 1, 16, dtype=dtype)
                    for dtype in (torch.float16, torch.float64))
    for on in (True, False):
        with triton_enabled(on):
            for q in (half, double):
                for k in (half, double):
                    k = k.expand(1, 1, 2, 16)
                    cached_attention(q, k, k)
    cached_attention(half, k.half(), k.half())
    with triton_enabled(True):
        odd = half[..., :15]
        assert kernel_takes(odd, odd) and not kernel_takes(odd, odd.char())
    assert served == [torch.float16]


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_long_chunks_in_half_precision(dtype):
    """Blocks of 64 query rows, which use different tensor core instructions from those of 16."""
    q, q_cpu, k, k64, v, v64 = inputs('cuda', (2, 12, 64, 64), (2, 1, 300, 64), torch.int8, dtype)
    for window in (0, 50):
        seen = visible(300, window)[300 - 64:].expand(2, 64, 300)
        assert off(attend(q, k, v, window=window), dense(q_cpu, k64, v64, seen)) < TOLERANCE[dtype]


def test_nan_is_not_lost(device):
    """NaN queries must give NaN outputs, so that the request can be ended, even with split keys."""
    q, _ = queries(2, 4, 1, 16, torch.float32, device)
    q[1] = torch.nan
    k, _ = stored((2, 1, 300, 16), torch.int8, device, 1)
    v, _ = stored((2, 1, 300, 16), torch.int8, device, 2)
    for n_splits in (1, 2):
        y = attend(q, k, v, tuning=Tuning(n_splits=n_splits))
        assert y[1].isnan().all() and y[0].isfinite().all()


# -- steps of a cache: prompts, chunks, ragged rows, wrapped rings, pages --------------------------

def steps(model, cache, idx):
    """Feed chunks of different lengths; return the logits of each row's last token."""
    out = []
    for lens in ([5, 3], [4, 4], [1, 1], [0, 3], [1, 1]):
        starts = cache.lengths.tolist()
        piece = torch.stack([idx[b, starts[b]:starts[b] + max(lens)] for b in range(2)])
        logits = model(piece, cache=cache, lens=lens)[0]
        out += [logits[b] for b in range(2) if lens[b]]
    return torch.stack(out)


@pytest.mark.parametrize('paged', [False, True], ids=['contiguous', 'paged'])
@pytest.mark.parametrize('kv_dtype', ['float32', 'int8'])
@torch.inference_mode()
def test_give_what_plain_torch_gives(device, kv_dtype, paged):
    model = random_model(GPTConfig(**FULL_STACK), torch.float32).to(device)
    idx = tokens(2, 40).to(device)
    how = dict(cache_class=PagedKVCache, n_pages=12, page_size=4) if paged else {}
    found = steps(model, model.new_cache(2, 20, kv_dtype, **how), idx)
    with triton_enabled(False):
        expected = steps(model, model.new_cache(2, 20, kv_dtype, **how), idx)
    # a different summation order may change a value's int8 rounding, which later layers amplify
    gaps = (found - expected).abs().amax((1, 2))
    assert gaps.max() < (1e-4 if kv_dtype == 'float32' else 5e-2) and gaps.median() < 1e-3
