"""Bytes of a cache in pages: what it allocates, what it holds, what fits."""
import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import UserError
from config.gpt_config import GPTConfig
from engine.paged import PagedKVCache
from engine.pages import OutOfPages
from kv.plan import KV_DTYPES, plan_kv
from tests.helpers.models import FULL_STACK, PUBLISHED, configs, feed, random_model, tokens
from tests.helpers.runs import Run

pytestmark = pytest.mark.filterwarnings('ignore:layer_pattern')
STACK = GPTConfig(**FULL_STACK)


def live_bytes():
    gc.collect()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                for x in gc.get_objects()
                if type(x) is torch.Tensor and x.device.type == 'cpu'}
    return sum(storages.values())


@pytest.mark.parametrize('kv_dtype', KV_DTYPES)
@pytest.mark.parametrize('max_seq_len', [100, 1024])
def test_live_storages_grow_by_what_cache_and_plan_say(kv_dtype, max_seq_len):
    plan = plan_kv(GPTConfig(n_layer=12, n_head=12, n_embd=768, vocab_size=64, **PUBLISHED,
                             window_size=256))
    before = live_bytes()
    cache = PagedKVCache(plan, 2, max_seq_len, n_pages=9, page_size=16, kv_dtype=kv_dtype)
    grown = live_bytes() - before
    assert grown == cache.nbytes == plan.page_nbytes(16, kv_dtype) * 9 + plan.rings_nbytes(2,
                                                            max_seq_len, kv_dtype)
    assert cache.held_nbytes == plan.rings_nbytes(2, max_seq_len, kv_dtype)


@settings(max_examples=30)
@given(config=configs(), batch=st.integers(1, 3), max_seq_len=st.integers(1, 50),
       kv_dtype=st.sampled_from(list(KV_DTYPES)),
       n_pages=st.integers(1, 20), page_size=st.sampled_from([1, 2, 3, 7, 64]))
def test_allocated_equals_planned_for_any_plan(config, batch, max_seq_len, kv_dtype, n_pages,
                                               page_size):
    plan = plan_kv(config)
    cache = PagedKVCache(plan, batch, max_seq_len, n_pages, page_size, kv_dtype=kv_dtype)
    rings = plan.rings_nbytes(batch, max_seq_len, kv_dtype)
    assert cache.nbytes == plan.page_nbytes(page_size, kv_dtype) * n_pages + rings
    assert rings + plan.page_nbytes(batch * max_seq_len, kv_dtype) == plan.nbytes(batch,
                                                            max_seq_len, kv_dtype)


def test_steps_forks_and_resets_allocate_no_keys_or_values():
    run = Run(STACK, 3, 40, n_pages=30, page_size=4)
    run.step([7, 0, 1])
    storages = [x.data_ptr() for store in run.cache.stores for x in store.tensors]
    nbytes = run.cache.nbytes
    run.fork(0, 1)
    run.step([1, 1, 1])
    run.reset(0)
    run.move(1, 0)
    run.step([3, 1, 4])
    assert [x.data_ptr() for store in run.cache.stores
            for x in store.tensors] == storages and run.cache.nbytes == nbytes


# -- fill_ and what is refused ---------------------------------------------------------------------

@pytest.mark.parametrize('kv_dtype', ['float32', 'int8'])
def test_fill_takes_pages_for_every_row(kv_dtype):
    model = random_model(STACK, torch.float32)
    cache = model.new_cache(2, 64, kv_dtype, cache_class=PagedKVCache, n_pages=32, page_size=4)
    feed(model, cache, tokens(2, 9), [9])
    assert cache.fill_(61) is cache
    assert cache.lengths.tolist() == [61, 61] and cache.table.n_free == 0
    for store in cache.stores:
        for x in store.tensors:
            assert (x != 0).any(-1).all()
    with torch.no_grad():
        assert model(tokens(2, 1), cache=cache)[0].isfinite().all()
    cache.fill_(0)
    assert cache.table.n_free == 32


def test_fill_beyond_the_pool_leaves_an_empty_cache():
    run = Run(STACK, 2, 40, n_pages=9, page_size=4)
    run.step([5, 5])
    with pytest.raises(UserError, match='41'):
        run.cache.fill_(41)
    run.step([1, 1])
    with pytest.raises(OutOfPages, match='10 .* 9 of 9'):
        run.cache.fill_(20)
    run.text = [[], []]
    run.step([13, 5])
    run.step([1, 1])


@pytest.mark.parametrize('paging',
                         [dict(cache_class=PagedKVCache, n_pages=-1),
                          dict(cache_class=PagedKVCache, n_pages=4, page_size=0)])
def test_a_pool_of_nothing_is_refused(paging):
    with pytest.raises(UserError, match='page_size=.*n_pages=.*at least 1'):
        random_model(STACK).new_cache(2, 20, **paging)
