"""Which keys a query sees (0 <= i - j < window), and fast sliding-window attention (blocks,
FlexAttention) against dense attention in float64."""
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask

from attention.causal import causal_attention
from attention.kernels import flex
from attention.kernels.choose import PREFERRED
from attention.kernels.flex import block_mask, flex_local_attention
from attention.local import blockwise_local_attention
from attention.masks import dense_mask, in_window
from model import GPT, GPTConfig
from tests.helpers.models import max_gap as gap
from tests.helpers.reference import dense_attention, visible
from training.step.kernels import prepare

HEADS = [(1, 1), (4, 4), (4, 2), (6, 1)]


def qkv(t, heads=(4, 2), prefix=0, batch=2, dim=6, seed=0, dtype=torch.float64):
    """Random q, k, v, with a standard deviation of scores of about 2: far from uniform weights."""
    g = torch.Generator().manual_seed(seed)
    H, Hkv = heads
    shapes = (batch, H, t, dim), (batch, Hkv, prefix + t, dim), (batch, Hkv, prefix + t, dim)
    return tuple((torch.randn(s, generator=g, dtype=torch.float64) * 1.4).to(dtype) for s in shapes)


@settings(max_examples=60)
@given(t=st.integers(1, 150),
       window=st.sampled_from([1, 2, 7, 31, 32, 33, 40, 64]) | st.integers(1, 160),
       heads=st.sampled_from(HEADS), prefix=st.sampled_from([0, 0, 1, 5, 31, 32, 33, 70]))
def test_blockwise_values_and_gradients(t, window, heads, prefix):
    inputs = qkv(t, heads, prefix, batch=1 + t % 2, seed=t)
    upstream, found = torch.randn_like(inputs[0]), []
    for attend in (blockwise_local_attention, dense_attention):
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = attend(*leaves, window)
        y.backward(upstream)
        found.append([y, *(leaf.grad for leaf in leaves)])
    assert gap(found[0][0], found[1][0]) < 1e-12
    assert all(gap(a, b) < 1e-10 for a, b in zip(*found))


@pytest.mark.filterwarnings('ignore:flex_attention called without')
@pytest.mark.parametrize('t, window', [
    (1, 1), (50, 7), (100, 128), (128, 1), (150, 40), (300, 129), (257, 5)])
@pytest.mark.parametrize('heads', [(2, 2), (4, 1)])
def test_flex_values(t, window, heads):
    inputs = qkv(t, heads, batch=1, dim=16, dtype=torch.float32)
    y = flex_local_attention(*inputs, window, compiled=False)
    assert gap(y.double(), dense_attention(*inputs, window)) < 1e-5


# -- how FlexAttention is compiled: Dynamo traces on a CPU, a backend that runs the graphs stands fo

@pytest.fixture
def graphs(monkeypatch):
    counter = CompileCounterWithBackend('eager')
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend=counter))
    flex._compiled_flex_attention.cache_clear()
    torch._dynamo.reset()
    yield counter
    flex._compiled_flex_attention.cache_clear()
    torch._dynamo.reset()


def test_flex_is_compiled_once_for_each_length_window_and_layout(graphs):
    """There are more of them than Dynamo compiles for one code object. The kernel asked for takes
    short sequences."""
    cases = [(t, window, layout) for t in (40, 50, 160) for window in (7, 37) for layout in (0, 1)]
    assert len(cases) > torch._dynamo.config.recompile_limit
    with torch.no_grad():
        for _ in range(2):
            for t, window, layout in cases:
                inputs = qkv(t, dim=16)
                expected = dense_attention(*inputs, window)
                if layout:
                    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
                assert gap(flex_local_attention(*inputs, window), expected) < 1e-12
            assert len(graphs.graphs) == len(cases)
    for graph in graphs.graphs:
        node, = graph.graph.find_nodes(op='call_function',
                                       target=torch.ops.higher_order.flex_attention)
        options, = (x for x in (*node.args, *node.kwargs.values()) if isinstance(x, dict))
        assert options['BACKEND'] == 'TRITON'


def test_flex_does_not_run_uncompiled_past_the_recompile_limit(graphs, monkeypatch):
    compiled = flex._compiled_flex_attention(None, None)
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(flex, '_compiled_flex_attention', lambda *_: compiled)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            for t in range(40, 160, 10):
                flex_local_attention(*qkv(t, dim=16), 37)


# -- dropout: with v = identity the output is the matrix of weights --------------------------------

T = 70


def weights(window, p, heads=(4, 2), seed=0):
    """(B, H, T, T) attention weights after dropout, as multiplied with V."""
    q, k, _ = qkv(T, heads, dim=T)
    v = torch.eye(T, dtype=torch.float64).expand_as(k)
    torch.manual_seed(seed)
    return causal_attention(q / 4, k / 4, v, window, dropout_p=p)


@pytest.mark.parametrize('window', [5, 40])
def test_dropout_zeroes_weights_of_every_query_head_and_row_and_scales_up_the_others(window):
    p = 0.3
    clean, dropped = weights(window, 0.0), weights(window, p)
    kept = dropped != 0
    assert gap(dropped, kept * clean / (1 - p)) < 1e-12
    seen = visible(T, window)
    assert not kept[~seen.expand_as(kept)].any()
    # more than 2,600 weights: 3 sigma
    assert kept[seen.expand_as(kept)].double().mean().item() == pytest.approx(1 - p, abs=0.03)
    assert len({tuple(row.tolist()) for row in kept[..., T - 1, :].flatten(0, 1)}) > 1
    assert all((~kept[..., i, :] & seen[i]).any() for i in range(8, T))


# -- masks -----------------------------------------------------------------------------------------

@given(n_queries=st.integers(1, 12), prefix=st.integers(0, 12), window=st.integers(0, 25))
def test_dense_mask_puts_the_last_query_at_the_last_key(n_queries, prefix, window):
    n_keys = prefix + n_queries
    assert torch.equal(dense_mask(n_queries, n_keys, window), visible(n_keys, window)[prefix:])


CPU = torch.device('cpu')
LENGTHS = [1, 127, 128, 129, 256, 257, 500, 641]
WINDOWS = [0, 1, 2, 63, 127, 128, 129, 130, 254, 255, 256, 257, 300, 383, 384, 385, 511, 640, 700]


def columns(n_blocks, indices):
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
            assert columns(*both[0]) == columns(*both[1]), (kind, window)
            for a, b in zip(*both):
                assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
    assert block_mask(T, 37, CPU) is block_mask(T, 37, CPU)  # made once


# -- compiled --------------------------------------------------------------------------------------

@pytest.mark.parametrize('flex', [False, True], ids=['blockwise', 'flex'])
def test_forward_is_one_graph_and_equals_eager(monkeypatch, flex):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=64, vocab_size=78, n_layer=3, n_head=4, n_embd=64, n_kv_head=1,
                          layer_pattern='LLG', kv_share='AAB', share_global_kv=True, window_size=16,
                          pos_embedding='rope', qk_norm=True)).eval()
    idx = torch.randint(78, (2, 64))
    with torch.no_grad():
        eager, _ = model(idx, all_logits=True)
        if flex:
            monkeypatch.setitem(PREFERRED, 'local', ('flex',))
            monkeypatch.setattr('attention.kernels.choose.why_unavailable', lambda *_: '')
            monkeypatch.setitem(PREFERRED, 'global', ('sdpa',))
        prepare(model, 64)
        compiled, _ = torch.compile(model, fullgraph=True, backend='aot_eager')(idx,
                                                                                all_logits=True)
    assert (compiled - eager).abs().max() < 1e-6
