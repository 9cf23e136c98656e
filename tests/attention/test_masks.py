"""The definition of which keys a query sees, against the rule: 0 <= i - j < window."""
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from attention.kernels.flex import block_mask
from attention.masks import dense_mask, in_window
from tests.helpers.reference import visible


@given(n_queries=st.integers(1, 12), prefix=st.integers(0, 12), window=st.integers(0, 25))
def test_dense_mask_puts_the_last_query_at_the_last_key(n_queries, prefix, window):
    n_keys = prefix + n_queries
    assert torch.equal(dense_mask(n_queries, n_keys, window), visible(n_keys, window)[prefix:])


CPU = torch.device('cpu')
LENGTHS = [1, 127, 128, 129, 256, 257, 500, 641]
WINDOWS = [0, 1, 2, 63, 127, 128, 129, 130, 254, 255, 256, 257, 300, 383, 384, 385, 511, 640, 700]


def rows(n_blocks, indices):
    """The columns listed in each row of a BlockMask; entries after them have no meaning."""
    return [row[:n].tolist() for n, row in zip(n_blocks[0, 0].tolist(), indices[0, 0])]


@pytest.mark.parametrize('T', LENGTHS)
def test_block_mask_is_that_of_create_block_mask(T):
    i = torch.arange(T)
    for window in (*WINDOWS, T):
        ours = block_mask(T, window, CPU)
        torchs = create_block_mask(lambda b, h, q, k: in_window(q, k, window), None, None, T, T,
                                   CPU)
        assert ours.shape == torchs.shape and ours.BLOCK_SIZE == torchs.BLOCK_SIZE
        assert torch.equal(ours.to_dense(), torchs.to_dense())
        assert torch.equal(ours.mask_mod(0, 0, i[:, None], i), visible(T, window))
        for kind in ('kv', 'full_kv', 'q', 'full_q'):
            both = [(getattr(mask, f'{kind}_num_blocks'), getattr(mask, f'{kind}_indices'))
                    for mask in (ours, torchs)]
            assert rows(*both[0]) == rows(*both[1]), (kind, window)
            for a, b in zip(*both):
                assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
    assert block_mask(T, 37, CPU) is block_mask(T, 37, CPU)  # made once
