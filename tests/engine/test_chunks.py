"""Attention of prompts' chunks in C++, against dense attention in float64."""
import pytest
import torch

import attention.cached
from attention.cached import dequantized
from common.gpt_config import GPTConfig
from engine import native
from engine.engine import Engine
from engine.pages import chunks
from engine.pages.cache import PagedKVCache
from engine.requests.params import SamplingParams
from engine.steps.native import FEW
from kv.slots import QUANTIZE
from tests.engine.test_native import WIDE
from tests.helpers.models import max_gap, random_model, tokens
from tests.helpers.reference import dense_attention

pytestmark = pytest.mark.skipif(native.library() is None, reason='no compiler here')


def stored_as(kv_dtype, k, v):
    dtype = torch.uint8 if kv_dtype == 'int4' else getattr(torch, kv_dtype)
    if dtype not in QUANTIZE:
        return k.to(dtype), v.to(dtype)
    (k, k_scale), (v, v_scale) = map(QUANTIZE[dtype], (k, v))
    return k, v, k_scale, v_scale


def in_pages(stored, size, transposed):
    """A pool of pages, in the reverse order and between pages of NaN, and the table."""
    n = -(-stored[0].size(2) // size)
    B = len(stored[0])
    table = torch.arange(B * n).view(B, n).flip(0, 1).int() * 2 + 1
    pool = []
    for x in stored:
        x = torch.nn.functional.pad(x, (0, 0, 0, n * size - x.size(2)))
        pages = x.new_full((2 * B * n, x.size(1), size, x.size(3)),
                           torch.nan if x.is_floating_point() else 77)
        pages[table.flatten().long()] = x.unflatten(2, (n, size)).transpose(1, 2).flatten(0, 1)
        pool.append(pages)
    if transposed:
        pool[0] = pool[0].transpose(2, 3).contiguous().transpose(2, 3)
    return pool, table


@pytest.mark.parametrize('kv_dtype', ['float32', 'bfloat16', 'int8', 'int4'])
@pytest.mark.parametrize('n_head, n_kv_head, D', [(4, 2, 24), (12, 1, 64), (3, 3, 10), (2, 1, 2)])
def test_it_equals_dense_attention(n_head, n_kv_head, D, kv_dtype):
    """Contiguous, and in pages; behind windows; past several tiles of keys and queries. Tiles of
    the processor take a float as two bfloat16."""
    bound = 3e-5 if native.library().tiles and kv_dtype != 'float32' else 1e-5
    for S, t, window, sink in ((300, 170, 0, True), (300, 3, 0, False), (61, 61, 7, True),
                               (320, 200, 140, False), (200, 130, 1, False), (5, 5, 900, False)):
        q = torch.randn(2, t, n_head, D).transpose(1, 2)
        stored = stored_as(kv_dtype, *torch.randn(2, 2, n_kv_head, S, D))
        sink = torch.randn(n_head) if sink else None
        expected = dense_attention(q, *dequantized(torch.float64, *stored), window, sink)
        start = max(0, S - t - window + 1) if window else 0  # what a ring holds
        ring = [x[:, :, start:] for x in stored]
        rows = [S - t - start] * 2, [t] * 2
        assert max_gap(chunks.attend(q, ring, *rows, window, sink), expected) < bound
        y = chunks.attend(q.bfloat16(), ring, *rows, window, sink)
        assert y.dtype == torch.bfloat16 and max_gap(y, expected) < 0.05
        for size, transposed in ((16, kv_dtype in ('float32', 'int8')), (7, False)):
            pool, table = in_pages(stored, size, transposed)
            y = chunks.attend(q, pool, [S - t] * 2, [t] * 2, window, sink, table)
            assert max_gap(y, expected) < bound, (S, size)


@pytest.mark.parametrize('threads', [1, 5])
def test_rows_of_different_lengths(monkeypatch, threads):
    """Padding is 0, and the pages that it would need are missing."""
    monkeypatch.setattr(torch, 'get_num_threads', lambda: threads)
    before, lens, t = [0, 21, 7], [30, 1, 0], 30
    q, (k, v) = torch.randn(3, 4, t, 16), torch.randn(2, 3, 2, 64, 16)
    pool, table = in_pages((k, v), 8, True)
    for row, (a, n) in enumerate(zip(before, lens)):
        table[row, -(-(a + n) // 8):] = -1
    y = chunks.attend(q, pool, before, lens, table=table)
    for row, (a, n) in enumerate(zip(before, lens)):
        kv = (x[row:row + 1, :, :a + n] for x in (k, v))
        assert not y[row, :, n:].any()
        if n:
            expected = dense_attention(q[row:row + 1, :, :n], *kv)
            assert max_gap(y[row:row + 1, :, :n], expected) < 1e-5


def test_a_paged_cache_uses_it_for_chunks(recorded):
    """Not for single tokens, in float64 or where gradients may be wanted."""
    called, idx = recorded(chunks, 'attend', lambda q, *args, **kwargs: q.dtype), tokens(2, 40)
    for dtype in (torch.float32, torch.float64):
        model = random_model(GPTConfig(**WIDE), dtype)
        cache = model.new_cache(2, 60, cache_class=PagedKVCache, n_pages=20, page_size=8)
        cache.chunks_in_cpp = True
        with torch.no_grad():
            for a, b in ((0, 9), (9, 10), (10, 31)):
                model(idx[:, a:b], cache=cache, all_logits=True)
    assert called == [torch.float32] * 2 * len(model.plan.layers)
    cache.reset()
    model.float()(idx, cache=cache)
    assert len(called) == 2 * len(model.plan.layers)


@pytest.mark.parametrize('scale', [1.0, 1.1])
def test_the_engine_uses_it_if_its_steps_agree_with_the_model(monkeypatch, scale, recorded):
    called = recorded(chunks, 'attend', lambda *args, **kwargs: None)
    plain = attention.cached._attend
    monkeypatch.setattr(attention.cached, '_attend', lambda q, *args: plain(q * scale, *args))
    monkeypatch.setattr('engine.steps.native.suits_prompts', lambda dtype: False)
    engine = Engine(random_model(GPTConfig(**WIDE), torch.float32), 2, 60)
    engine.generate([[1] * (FEW + 1)], SamplingParams(max_new_tokens=2))
    assert engine.cache.chunks_in_cpp == bool(called) == (scale == 1)


@pytest.mark.parametrize('window, score, far', [(7, 0, 1), (0, -90, 1), (0, -90, 128)])
def test_keys_that_are_not_seen_or_score_far_below_weigh_exactly_0(window, score, far):
    """Products of weights of 1e-38 would be denormal, and slow on some processors. The first values
    are so large that a weight above 0 shows."""
    q, k, v = torch.ones(1, 2, 150, 16), torch.zeros(1, 1, 150, 16), torch.ones(1, 1, 150, 16)
    k[:, :, :far], found = score / 4, []
    for value in (0, 3e38 / far):
        v[:, :, :far] = value
        found.append(chunks.attend(q, (k, v), [0], [150], window)[:, :, far + 7:])
    assert torch.equal(*found)
