"""Softmax in parts: however the keys are split, the parts join to one softmax."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.cached import (
    PartialSoftmax,
    join_parts,
    scores_dtype,
    tile_scores,
    tiles,
)
from tests.helpers.models import max_gap as gap

LOWEST = torch.finfo(torch.float64).min


def inputs(b=2, n_kv_head=2, n_rows=3, S=17, D=4, sharpness=1.0, seed=0):
    """Queries (b, Hkv, R, D), keys and values (b, Hkv, S, D)."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(b, n_kv_head, n, D, generator=g, dtype=torch.float64)
               for n in (n_rows, S, S))
    return q * sharpness, k, v


def part(q, k, v, a, b, mask=None):
    scores = tile_scores(q, k[:, :, a:b], None)
    scores = scores if mask is None else scores.masked_fill(~mask[..., a:b], LOWEST)
    return PartialSoftmax.of(scores, v[:, :, a:b])


def whole(q, k, v, mask=None):
    scores = q @ k.transpose(2, 3)
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v


@settings(max_examples=80)
@given(data=st.data(), cuts=st.sets(st.integers(1, 16)),
       sharpness=st.sampled_from([0.1, 1.0, 30.0]), masked=st.booleans())
def test_parts_of_any_split_in_any_order_join_to_one_softmax(data, cuts, sharpness, masked):
    q, k, v = inputs(sharpness=sharpness)
    mask = None
    if masked:
        mask = torch.rand(2, 1, 3, 17, generator=torch.Generator().manual_seed(len(cuts))) < 0.3
        mask[..., data.draw(st.integers(0, 16))] = True
    edges = [0, *sorted(cuts), 17]
    parts = data.draw(st.permutations([part(q, k, v, a, b, mask)
                                       for a, b in zip(edges, edges[1:])]))
    assert gap(join_parts(parts), whole(q, k, v, mask)) < 1e-12


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('shift', [1e4, -1e4, 3e38])
def test_large_scores_neither_overflow_nor_vanish(dtype, shift):
    """exp(1e4) is inf in any dtype, so only differences of scores may be exponentiated."""
    g = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 4, (1, 1, 2, 8), generator=g).to(dtype)
    v = torch.randn(1, 1, 8, 4, generator=g).to(dtype)
    if shift < 1e38:
        expected = scores.double().softmax(-1) @ v.double()
    else:  # rounding removes the differences between the scores
        expected = v.double().mean(2, keepdim=True).expand(1, 1, 2, 4)
    parts = [PartialSoftmax.of((scores + shift)[..., a:b].clone(), v[:, :, a:b])
             for a, b in ((0, 3), (3, 8))]
    y = join_parts(parts)
    assert gap(y.double(), expected) < 1e-5


# -- tiles -----------------------------------------------------------------------------------------

@settings(max_examples=150)
@given(B=st.integers(1, 5), n_kv_head=st.integers(1, 3), S=st.integers(1, 40), D=st.integers(1, 6),
       size=st.integers(1, 900))
def test_tiles_cover_everything_once_and_are_no_larger_than_asked(B, n_kv_head, S, D, size):
    seen = torch.zeros(B, S, dtype=torch.int64)
    previous = (0, 0)
    for rows, keys in tiles((B, n_kv_head, S, D), size):
        n_rows, n_keys = rows.stop - rows.start, keys.stop - keys.start
        assert n_rows * n_keys * n_kv_head * D <= max(size, n_kv_head * D)
        assert (keys.start, keys.stop) == (0, S) or n_rows == 1   # split keys: a single row
        assert (rows.start, keys.start) >= previous               # parts of a row are in order
        previous = rows.start, keys.start
        seen[rows, keys] += 1
    assert (seen == 1).all()


def test_one_tile_where_everything_fits():
    shape = 3, 2, 5, 4
    assert list(tiles(shape, 120)) == [(slice(0, 3), slice(0, 5))]
    assert list(tiles(shape, 119)) == [(slice(0, 2), slice(0, 5)), (slice(2, 3), slice(0, 5))]


def test_scores_are_at_least_float32():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert scores_dtype(dtype) == expected
