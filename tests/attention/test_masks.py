"""The one definition of who sees whom, against the rule written out: 0 <= i - j < window."""
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.masks import block_mask, dense_mask, in_window
from tests.helpers.reference import visible


def seen(i, j, window):
    last = range(i + 1) if window == 0 else range(max(i - window + 1, 0), i + 1)
    return j in last


@given(i=st.integers(0, 60), j=st.integers(0, 60), window=st.integers(0, 62))
def test_ints(i, j, window):
    assert bool(in_window(i, j, window)) == seen(i, j, window)


@pytest.mark.parametrize('window', [0, 1, 2, 5, 8, 9, 100])
def test_tensors_broadcast_and_the_window_may_be_one(window):
    i, j = torch.arange(9)[:, None], torch.arange(9)[None]
    expected = torch.tensor([[seen(i, j, window) for j in range(9)] for i in range(9)])
    assert torch.equal(in_window(i, j, window), expected)
    if window:
        assert torch.equal(in_window(i, j, torch.tensor(window)), expected)


def test_the_window_counts_the_query_itself():
    assert [j for j in range(9) if in_window(5, j, 1)] == [5]
    assert [j for j in range(9) if in_window(5, j, 3)] == [3, 4, 5]


@given(n_queries=st.integers(1, 12), prefix=st.integers(0, 12), window=st.integers(0, 25))
def test_dense_mask_puts_the_last_query_at_the_last_key(n_queries, prefix, window):
    n_keys = prefix + n_queries
    assert torch.equal(dense_mask(n_queries, n_keys, window), visible(n_keys, window)[prefix:])


def test_block_mask_is_the_same_window_and_made_once():
    mask = block_mask(200, 37, torch.device('cpu'))
    i, j = torch.arange(200)[:, None], torch.arange(200)[None]
    zero = torch.tensor(0)
    assert torch.equal(mask.mask_mod(zero, zero, i, j), visible(200, 37))
    assert block_mask(200, 37, torch.device('cpu')) is mask
    assert block_mask(200, 36, torch.device('cpu')) is not mask
