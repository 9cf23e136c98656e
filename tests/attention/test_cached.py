"""Attention of new queries over cached keys, against dense attention in float64."""
import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention import backends, cached
from attention.cached import cached_attention, dequantize, scores_dtype, tiles
from kv.quantize import quantize_int8
from tests.helpers.models import Largest
from tests.helpers.models import max_gap as gap
from tests.helpers.reference import dense_attention

HEADS = [(1, 1), (4, 4), (4, 2), (6, 1)]


def qkv(t, n_keys, heads=(4, 2), batch=2, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (batch, heads[0], t, 6), (batch, heads[1], n_keys, 6), (batch, heads[1], n_keys, 6)
    return tuple((torch.randn(s, generator=g, dtype=torch.float64) * 1.4).to(dtype) for s in shapes)


def attend_int8(q, k, v, **how):
    (k, k_scale), (v, v_scale) = quantize_int8(k), quantize_int8(v)
    return cached_attention(q, k, v, k_scale, v_scale, **how)


def rounded(x):
    return dequantize(*quantize_int8(x), torch.float64)


# how K and V are stored -> (attention over them so stored, what the dense reference must be given)
STORED = pytest.mark.parametrize(
    'attend, held', [(cached_attention, lambda x: x), (attend_int8, rounded)],
    ids=['float64', 'int8'])


@pytest.fixture(params=[1, 30, 100, 2 ** 18])
def tile(request, monkeypatch):
    """Elements of K per tile: one position, several positions, entire rows, or everything. A chunk
    of more than 4 queries is also cut, except in the last case."""
    monkeypatch.setattr(tiles, '__defaults__', (request.param,))
    monkeypatch.setattr(cached, 'SCORES', request.param)
    monkeypatch.setattr(cached, 'FEWEST', 4)


@STORED
@pytest.mark.parametrize('heads', HEADS)
@pytest.mark.parametrize('window, n_keys', [(0, 1), (0, 37), (5, 5), (5, 3)])
def test_one_token_sees_every_key_in_any_order(tile, attend, held, heads, window, n_keys):
    q, k, v = qkv(1, n_keys, heads)
    shuffled = torch.randperm(n_keys, generator=torch.Generator().manual_seed(1))
    expected = dense_attention(q, held(k), held(v))
    assert gap(attend(q, k[:, :, shuffled], v[:, :, shuffled], window=window), expected) < 1e-12


@STORED
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(t=st.integers(1, 50), held_by=st.lists(st.integers(0, 40), min_size=1, max_size=3),
       heads=st.sampled_from(HEADS), window=st.sampled_from([0, 1, 2, 5, 32, 33, 200]))
def test_chunks_over_keys_in_order(tile, attend, held, t, held_by, heads, window):
    """Each row's output is what it would be by itself, whatever is stored after its keys."""
    if window and len(held_by) == 1:  # what a ring holds
        held_by = [min(held_by[0], window - 1)]
    lengths = [n + t for n in held_by]
    q, k, v = qkv(t, max(lengths) + (len(lengths) > 1), heads, batch=len(lengths))
    y = attend(q, k, v, window=window,
               kv_lens=torch.tensor(lengths) if len(lengths) > 1 else None)
    for b, n in enumerate(lengths):
        reach = window if t > 1 else 0  # a single token sees all its keys
        alone = dense_attention(q[b:b + 1], *(held(x[b:b + 1, :, :n]) for x in (k, v)), reach)
        assert gap(y[b:b + 1], alone) < 1e-12


@STORED
def test_a_row_without_keys_is_finite(tile, attend, held):
    q, k, v = qkv(1, 3, batch=1)
    assert attend(q, k, v, window=2, kv_lens=torch.tensor([0])).isfinite().all()


@STORED
def test_large_scores_neither_overflow_nor_vanish(tile, attend, held):
    """exp(1e4) is inf in any dtype, so only differences of scores may be exponentiated."""
    q, k, v = qkv(1, 37)
    for size in (1e4, -1e4):
        k[..., 0], q[..., 0] = size, 2.0
        assert gap(attend(q, k, v), dense_attention(q, held(k), held(v))) < 1e-9


def test_scores_are_at_least_float32():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert scores_dtype(dtype) == expected


@pytest.mark.parametrize('t, n_keys, dtype, window', [
    (5, 5, torch.float32, 0), (5, 5, torch.float32, 3), (3, 9, torch.float32, 4),
    (1, 9, torch.bfloat16, 0)], ids=['prompt', 'local prompt', 'local chunk', 'one token'])
def test_prompts_build_no_plan_for_each_length(monkeypatch, recorded, t, n_keys, dtype, window):
    """On CUDA, where torch prefers cuDNN, which does."""
    on_cuda = functools.partial(backends.sdpa_of_any_shape, torch.device('cuda'))
    monkeypatch.setattr('attention.cached.sdpa_of_any_shape', lambda device: on_cuda())
    allowed = recorded(F, 'scaled_dot_product_attention',
                       lambda *args, **kwargs: torch.backends.cuda.cudnn_sdp_enabled())
    cached_attention(*qkv(t, n_keys, dtype=dtype), window=window)
    assert allowed and not any(allowed)
    assert torch.backends.cuda.cudnn_sdp_enabled()


@STORED
@pytest.mark.parametrize('kv_lens', [None, [500, 300]])
def test_scores_take_memory_that_does_not_grow_with_the_text(attend, held, kv_lens, monkeypatch):
    """Of a chunk of 70 tokens after 430: 2 * 4 * 70 * 500 scores, in pieces."""
    monkeypatch.setattr(cached, 'SCORES', 2 ** 16)
    q, k, v = qkv(70, 500)
    lens = kv_lens and torch.tensor(kv_lens)
    with Largest() as largest:
        y = attend(q, k, v, kv_lens=lens)
    assert largest.n <= 2 ** 16
    for b, n in enumerate(kv_lens or [500, 500]):
        dense = dense_attention(q[b:b + 1], *(held(x)[b:b + 1, :, :n] for x in (k, v)), 0)
        assert gap(y[b:b + 1], dense) < 1e-12
