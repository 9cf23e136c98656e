"""Attention of new queries over what a cache holds, against dense attention in float64."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.cached import cached_attention
from attention.heads import fold_heads, unfold_heads
from tests.helpers.reference import dense_attention

HEADS = [(1, 1), (4, 4), (4, 2), (6, 1)]


def qkv(t, n_keys, heads=(4, 2), batch=2, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (batch, heads[0], t, 6), (batch, heads[1], n_keys, 6), (batch, heads[1], n_keys, 6)
    return tuple((torch.randn(s, generator=g, dtype=torch.float64) * 1.4).to(dtype) for s in shapes)


def gap(a, b):
    assert a.shape == b.shape
    return (a - b).abs().max().item()


@settings(max_examples=80)
@given(t=st.integers(2, 90), held=st.integers(0, 60), heads=st.sampled_from(HEADS),
       window=st.sampled_from([0, 1, 2, 5, 32, 33, 200]))
def test_chunks_over_keys_in_order(t, held, heads, window):
    held = min(held, window - 1) if window else held
    inputs = qkv(t, held + t, heads)
    assert gap(cached_attention(*inputs, window), dense_attention(*inputs, window)) < 1e-12


@pytest.mark.parametrize('heads', HEADS)
@pytest.mark.parametrize('window, n_keys', [(0, 1), (0, 37), (5, 5), (5, 3)])
def test_one_token_sees_every_key_in_any_order(heads, window, n_keys):
    q, k, v = qkv(1, n_keys, heads)
    shuffled = torch.randperm(n_keys, generator=torch.Generator().manual_seed(1))
    expected = dense_attention(q, k, v)
    assert gap(cached_attention(q, k[:, :, shuffled], v[:, :, shuffled], window), expected) < 1e-12


@settings(max_examples=40)
@given(data=st.data(), t=st.integers(1, 6), window=st.sampled_from([0, 1, 3, 8]), heads=st.sampled_from(HEADS))
def test_ragged_rows_by_position_tags(data, t, window, heads):
    """Each row's keys are shuffled among keys that are not there; its answer is that of the row alone."""
    lengths = data.draw(st.lists(st.integers(t, 20), min_size=2, max_size=3))
    B, S = len(lengths), 24
    q, k, v = qkv(t, S, heads, batch=B)
    q_pos = torch.tensor([[n - t + i for i in range(t)] for n in lengths])
    k_pos = torch.full((B, S), -1)
    places = [data.draw(st.permutations(range(S)))[:n] for n in lengths]
    for b, place in enumerate(places):
        k_pos[b, list(place)] = torch.arange(lengths[b])
    y = cached_attention(q, k, v, window, q_pos, k_pos)
    for b, place in enumerate(places):
        alone = dense_attention(q[b:b + 1], k[b:b + 1, :, list(place)], v[b:b + 1, :, list(place)], window)
        assert gap(y[b:b + 1], alone) < 1e-12


def test_a_query_that_sees_nothing_is_finite():
    q, k, v = qkv(1, 3, batch=1)
    y = cached_attention(q, k, v, 2, torch.tensor([[0]]), torch.tensor([[-1, -1, -5]]))
    assert y.isfinite().all()


def test_folding_keeps_each_query_head_with_its_kv_head():
    q = torch.arange(2 * 6 * 3 * 4).view(2, 6, 3, 4)
    folded = fold_heads(q, 2)
    assert folded.shape == (2, 2, 9, 4)
    for h in range(6):
        assert torch.equal(folded[:, h // 3, (h % 3) * 3:(h % 3) * 3 + 3], q[:, h])
    assert torch.equal(unfold_heads(folded, 6), q)
