"""The paged cache: its logits equal those of a full forward whatever is done to it, and it uses no
more memory than it reports."""
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.gpt_config import GPTConfig
from engine.pages import cache as cache_module
from engine.pages.cache import PagedKVCache, PagedStore, table_attention
from engine.pages.page_table import OutOfPages, page_nbytes, rows_nbytes
from engine.steps.static import put
from kv.plan import GLOBAL, KV_DTYPES, plan_kv
from lab.conform import random_config
from tests.helpers.models import FULL_STACK, VOCAB, configs, max_gap, random_model, tokens
from tests.helpers.reference import dense_attention
from tests.helpers.runs import Run

pytestmark = pytest.mark.filterwarnings('ignore:layer_pattern')
STACK = GPTConfig(**FULL_STACK)
SIZES = (1, 2, 3, 7, 64)  # of pages


def ample(batch, room, page_size):
    return dict(cache_class=PagedKVCache, n_pages=batch * -(-room // page_size),
                page_size=page_size)


# -- logits ----------------------------------------------------------------------------------------

@pytest.mark.parametrize('paged', [False, True], ids=['contiguous', 'paged'])
@pytest.mark.parametrize('quantized, n_runs', [('', 60), ('int8', 20)])
def test_anything_done_to_a_cache_equals_each_row_alone(quantized, n_runs, paged):
    """Ragged chunks, subsets of rows, resets, moves, any mechanisms; past two wraps of the window.
    A masked key has weight 0, and 0 * NaN is NaN: the values of NaN rows must not stay in a reused
    row or page."""
    for seed in range(n_runs):
        draw = random.Random(seed)
        config = random_config(draw, (1, 2, 3, 5, 8), vocab_size=VOCAB, kv_quant_train=quantized)
        batch, room = draw.randint(1, 4), 2 * max(config.window_size, 4) + 9
        pages = ample(batch, room, draw.choice(SIZES)) if paged else {}
        Run(config, batch, room, quantized or 'auto', **pages).anything(draw)


# -- pages -----------------------------------------------------------------------------------------

def test_out_of_pages_is_raised_before_anything_is_written():
    run = Run(STACK, 3, 40, n_pages=6, page_size=4)
    run.step([9, 8, 3])      # all 6 pages
    before = [x.clone() for store in run.cache.stores for x in store.tensors]
    for lens in ([0, 1, 0], [1, 1, 1], [4, 0, 0], [0, 0, 9]):
        with pytest.raises(OutOfPages, match=r'\d more pages of 4 .* 0 of 6 are free'):
            run.model(tokens(3, 9), cache=run.cache, lens=lens)
        assert run.cache.lengths.tolist() == [9, 8, 3] and run.cache.table.n_free == 0
    assert all(map(torch.equal, before, (x for store in run.cache.stores for x in store.tensors)))
    run.step([1, 0, 1])      # the last pages of these rows have room
    run.reset(2)
    run.step([0, 4, 0])


@pytest.mark.parametrize('call, words', [
    (lambda cache: cache.adopt(1, [0], 4), 'row 1 holds 2 pages'),
    *((lambda cache, rows=rows: cache.move(*rows), 'move: row .*0 to 3')
      for rows in ((0, 4), (-1, 0), (4, 0), (0, True))),
    (lambda cache: cache.reset([0, 4]), 'row 4'), (lambda cache: cache.fill_(41), '41')])
def test_what_cannot_be_is_refused_and_changes_nothing(call, words):
    run = Run(STACK, 4, 40, **ample(4, 40, 4))
    run.step([10, 5, 0, 0])
    run.cache.reserve(3, 5)
    n_free = run.cache.table.n_free
    with pytest.raises(UserError, match=words):
        call(run.cache)
    assert run.cache.table.n_free == n_free
    run.step([1, 1, 1, 1])


def test_a_token_that_goes_nowhere_leaves_a_page_that_another_writes_to_alone():
    """Rows not in the step have page -1, which indexes the last page, or a page that they share."""
    store = PagedStore(4, 1, 2, 3, torch.float32, torch.float32, torch.device('cpu'))
    k = torch.arange(1.0, 10).view(3, 1, 1, 3)
    put(store, torch.tensor([-1, 3, 3]), torch.tensor([-1, 0, -1]), (k, -k))
    for x, wanted in zip(store.tensors, (k[1], -k[1])):
        assert torch.equal(x[3, :, :1], wanted) and x.count_nonzero() == 3


def test_where_a_row_has_no_page_nothing_is_gathered():
    """Not even page 0, whose NaN would survive a weight of 0."""
    k = torch.arange(24.0).view(4, 1, 2, 3)
    k[0] = torch.nan
    q, table = torch.randn(2, 1, 1, 3), torch.tensor([[2, 1], [3, -1]], dtype=torch.int32)
    y = table_attention(q, (k, k), table, torch.tensor([3, 2]))
    first, second = torch.cat([k[2], k[1]], dim=1)[None, :, :3], k[3][None]
    assert torch.allclose(y, torch.cat([dense_attention(q[:1], first, first),
                                        dense_attention(q[1:], second, second)]).float())


def test_plain_torch_copies_about_a_tile_of_pages_at_a_time(monkeypatch, recorded):
    """Not every row as wide as the longest, nor rows that append nothing."""
    model = random_model(STACK).float()
    monkeypatch.setattr(cache_module, 'TILE', 8 * 4 * STACK.head_dim)  # 8 pages
    copied = recorded(cache_module, 'table_attention', lambda q, pool, table, *_: (*table.shape,))
    lens = [40, 2, 1, 3, 33, 2]
    paged, plain = (model.new_cache(6, 60, **kind) for kind in (dict(
        cache_class=PagedKVCache, n_pages=60, page_size=4), {}))
    ids = tokens(6, 41)
    for cache in paged, plain:
        model(ids[:, :40], cache=cache, lens=lens)
    copied.clear()
    step = [1, 1, 1, 1, 0, 1]
    found, expected = (model(ids[:, 40:], cache=cache, lens=step)[0] for cache in (paged, plain))
    rows = [b for b, n in enumerate(step) if n]
    assert max_gap(found[rows], expected[rows]) < 1e-4
    n_global = sum(layer.kind == GLOBAL for layer in model.plan.layers)
    assert copied == n_global * [(1, 11), (5, 1)]


# -- bytes -----------------------------------------------------------------------------------------

@settings(max_examples=30)
@given(config=configs(), batch=st.integers(1, 3), room=st.integers(1, 50),
       kv_dtype=st.sampled_from(list(KV_DTYPES)), n_pages=st.integers(1, 20),
       page_size=st.sampled_from(SIZES))
def test_allocated_equals_planned_for_any_plan(config, batch, room, kv_dtype, n_pages, page_size):
    plan = plan_kv(config)
    cache = PagedKVCache(plan, batch, room, n_pages, page_size, kv_dtype=kv_dtype)
    rings = rows_nbytes(plan, batch, room, kv_dtype)
    stores = [*cache.stores, *cache.states]
    allocated = sum({x.data_ptr(): x.untyped_storage().nbytes()
                     for store in stores for x in store.tensors}.values())
    assert allocated == cache.nbytes == page_nbytes(plan, page_size, kv_dtype) * n_pages + rings
    assert cache.held_nbytes == rings
    assert rings + batch * page_nbytes(plan, room, kv_dtype) == plan.nbytes(batch, room, kv_dtype)


def test_fill_takes_pages_for_every_row_or_is_an_error_that_a_reset_mends():
    run = Run(STACK, 2, 40, n_pages=9, page_size=4)
    run.step([5, 5])
    with pytest.raises(OutOfPages, match='5 more pages .* 4 of 9'):
        run.cache.fill_(20)
    run.reset(0, 1)
    assert run.cache.fill_(15) is run.cache and run.cache.table.n_free == 1
    for pool in run.cache.pools:
        for row in run.cache.table.rows:
            for x in pool.tensors:  # (pages, heads, positions, D) -> (heads, positions, D)
                assert (torch.cat([*x[row]], dim=1)[:, :15] != 0).any(-1).all()
    run.reset(0, 1)
    assert run.cache.table.n_free == 9
    run.step([13, 5])
    run.step([1, 1])
