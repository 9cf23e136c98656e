"""Softmax in parts: however the keys are split, the parts join to one softmax."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.softmax import PartialSoftmax, scores_dtype, tile_scores
from kv.quant import dequantize_int8, quantize_int8
from kv.view import KVView, Tile

LOWEST = torch.finfo(torch.float64).min


def inputs(b=2, n_kv_head=2, n_rows=3, S=17, D=4, sharpness=1.0, seed=0):
    """Queries (b, Hkv, R, D), keys and values (b, Hkv, S, D)."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(b, n_kv_head, n, D, generator=g, dtype=torch.float64) for n in (n_rows, S, S))
    return q * sharpness, k, v


def tile_of(k, v, a=0, b=None):
    b = k.size(2) if b is None else b
    return Tile((0, k.size(0)), (a, b), k[:, :, a:b], v[:, :, a:b], None, None)


def part(q, k, v, a, b, mask=None):
    tile = tile_of(k, v, a, b)
    scores = tile_scores(q, tile, q.dtype)
    return PartialSoftmax.of(scores if mask is None else scores.masked_fill(~mask[..., a:b], LOWEST), tile)


def whole(q, k, v, mask=None):
    scores = q @ k.transpose(2, 3)
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v


def gap(a, b):
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def joined(parts, order):
    """Parts joined pair by pair as `order` says, not only from left to right."""
    parts = list(parts)
    for at in order:
        at %= max(len(parts) - 1, 1)
        if len(parts) > 1:
            parts[at:at + 2] = [parts[at].join(parts[at + 1])]
    return parts[0]


@settings(max_examples=80)
@given(data=st.data(), cuts=st.sets(st.integers(1, 16)), sharpness=st.sampled_from([0.1, 1.0, 30.0]), masked=st.booleans())
def test_parts_of_any_split_in_any_order_join_to_one_softmax(data, cuts, sharpness, masked):
    q, k, v = inputs(sharpness=sharpness)
    mask = None
    if masked:
        mask = torch.rand(2, 1, 3, 17, generator=torch.Generator().manual_seed(len(cuts))) < 0.3
        mask[..., data.draw(st.integers(0, 16))] = True
    edges = [0, *sorted(cuts), 17]
    parts = data.draw(st.permutations([part(q, k, v, a, b, mask) for a, b in zip(edges, edges[1:])]))
    order = data.draw(st.lists(st.integers(0, 16), min_size=len(cuts), max_size=len(cuts)))
    assert gap(joined(parts, order).result(), whole(q, k, v, mask)) < 1e-12


@pytest.mark.parametrize('place', [0, 1, 2])
def test_a_tile_that_is_masked_wholly_counts_for_nothing(place):
    q, k, v = inputs(S=15)
    mask = torch.ones(1, 1, 3, 15, dtype=torch.bool)
    mask[..., 5 * place:5 * place + 5] = False
    v[:, :, 5 * place:5 * place + 5] = 1e6
    parts = [part(q, k, v, a, a + 5, mask) for a in (0, 5, 10)]
    assert gap(joined(parts, [0, 0]).result(), whole(q, k, v, mask)) < 1e-12


def test_a_row_that_sees_nothing_is_finite():
    q, k, v = inputs(S=10)
    mask = torch.zeros(1, 1, 3, 10, dtype=torch.bool)
    assert joined([part(q, k, v, a, a + 5, mask) for a in (0, 5)], [0]).result().isfinite().all()


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('shift', [1e4, -1e4, 3e38])
def test_large_scores_neither_overflow_nor_vanish(dtype, shift):
    """exp(1e4) is inf in any dtype; only differences of scores are ever exponentiated."""
    g = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 4, (1, 1, 2, 8), generator=g).to(dtype)
    v = torch.randn(1, 1, 8, 4, generator=g).to(dtype)
    expected = scores.double().softmax(-1) @ v.double() if shift < 1e38 else v.double().mean(2, keepdim=True).expand(1, 1, 2, 4)
    parts = [PartialSoftmax.of((scores + shift)[..., a:b].clone(), tile_of(v, v, a, b)) for a, b in ((0, 3), (3, 8))]
    y = parts[0].join(parts[1]).result()
    assert gap(y.double(), expected) < 1e-5


def test_parts_far_apart_give_the_higher_one():
    v = torch.arange(8.).view(1, 1, 4, 2).double()
    low, high = torch.full((1, 1, 1, 2), -1e4).double(), torch.full((1, 1, 1, 2), 1e4).double()
    first, second = PartialSoftmax.of(low, tile_of(v, v, 0, 2)), PartialSoftmax.of(high, tile_of(v, v, 2, 4))
    for y in (first.join(second), second.join(first)):
        assert gap(y.result(), v[:, :, 2:].mean(2, keepdim=True)) == 0


def test_scales_of_int8_keys_and_values_are_applied_after_the_products():
    q, k, v = inputs()
    view = KVView(quantize_int8(k), quantize_int8(v))
    tiles = list(view.tiles(20))
    assert len(tiles) > 4
    out = {}
    for tile in tiles:
        partial = PartialSoftmax.of(tile_scores(q[slice(*tile.rows)], tile, q.dtype), tile)
        out[tile.rows] = out[tile.rows].join(partial) if tile.rows in out else partial
    y = torch.cat([partial.result() for partial in out.values()])
    rounded = [dequantize_int8(*x, torch.float64) for x in (view.k, view.v)]
    assert gap(y, whole(q, *rounded)) < 1e-12


@pytest.mark.parametrize('dtype, expected', [(torch.bfloat16, torch.float32), (torch.float16, torch.float32),
                                             (torch.float32, torch.float32), (torch.float64, torch.float64)])
def test_scores_are_at_least_float32(dtype, expected):
    assert scores_dtype(dtype) == expected


# -- tiles ------------------------------------------------------------------------------------------------------------

@settings(max_examples=150)
@given(B=st.integers(1, 5), n_kv_head=st.integers(1, 3), S=st.integers(1, 40), D=st.integers(1, 6),
       size=st.integers(1, 900), int8=st.booleans())
def test_tiles_cover_everything_once_and_are_no_larger_than_asked(B, n_kv_head, S, D, size, int8):
    k = torch.arange(B * n_kv_head * S * D).view(B, n_kv_head, S, D).double() + 1
    stored = (k, -k) if not int8 else (k, -k, k[..., :1] / 2, k[..., :1] / 4)
    view = KVView(stored[0::2], stored[1::2])
    seen = torch.zeros(B, S, dtype=torch.int64)
    previous = (0, 0)
    for tile in view.tiles(size):
        rows, keys = slice(*tile.rows), slice(*tile.keys)
        for got, held in zip((tile.k, tile.v, tile.k_scale, tile.v_scale), stored):
            assert torch.equal(got, held[rows, :, keys])
        assert (tile.k_scale is None) == (tile.v_scale is None) == (not int8)
        assert tile.k.numel() <= max(size, n_kv_head * D)
        assert tile.keys == (0, S) or tile.rows[1] - tile.rows[0] == 1   # a part of the keys is one row's
        assert (tile.rows[0], tile.keys[0]) >= previous                  # in order, so that a row's parts follow each other
        previous = tile.rows[0], tile.keys[0]
        seen[rows, keys] += 1
    assert (seen == 1).all()


def test_one_tile_where_everything_fits():
    k = torch.randn(3, 2, 5, 4)
    assert [(tile.rows, tile.keys) for tile in KVView((k,), (k,)).tiles(k.numel())] == [((0, 3), (0, 5))]
    assert [(tile.rows, tile.keys) for tile in KVView((k,), (k,)).tiles(k.numel() - 1)] == [((0, 2), (0, 5)), ((2, 3), (0, 5))]
