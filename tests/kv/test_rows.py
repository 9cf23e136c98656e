"""Rows of a cache that are refused, fail midway or are reset."""
import pytest
import torch

from config.errors import UserError
from config.gpt_config import GPTConfig
from engine.pages.cache import PagedKVCache
from lab.benchmarks.kernels import fill_random
from tests.helpers.models import FULL_STACK, feed, random_model, tokens
from tests.helpers.runs import Run

pytestmark = pytest.mark.filterwarnings('ignore:layer_pattern')
STACK = GPTConfig(**FULL_STACK)
# contiguous, and paged with a pool that never runs out
PAGES = dict(cache_class=PagedKVCache, n_pages=100, page_size=3)
KINDS = pytest.mark.parametrize('paging', [{}, PAGES], ids=['contiguous', 'paged'])


@KINDS
@pytest.mark.parametrize('batch, t, lens, rows, words', [
    (3, 9, None, None, '12.*20'), (3, 9, [0, 3, 4], None, 'row 2.*17.*20'),
    (3, 30, [0, 30, 0], None, 'row 1.*30.*20'), (3, 2, [1, 1], None, r'\[1, 1\].*3'),
    (3, 2, [1, 1, 3], None, r'\[1, 1, 3\]'), (3, 2, [1, -1, 1], None, r'\[1, -1, 1\]'),
    (2, 2, None, None, '2.*3'), (4, 2, None, None, '4.*3'), (3, 0, None, None, '0'),
    (2, 2, None, [1, 1], r'\[1, 1\].*once'), (1, 2, None, [3], 'row 3.*0 to 2'),
    (1, 2, None, [-1], 'row -1.*0 to 2'), (1, 2, None, [True], 'row True.*0 to 2'),
    (1, 2, None, [0.0], 'row 0.0.*0 to 2'), (2, 2, None, [0], r'2 rows.*\[0\]'),
    (1, 2, None, [0, 1], r'1 rows.*\[0, 1\]'), (0, 2, None, [], r'\[\].*at least one')])
def test_a_refused_append_writes_nothing(paging, batch, t, lens, rows, words):
    run = Run(STACK, 3, 20, **paging)
    run.step([12, 12, 17])
    before = [x.clone() for store in run.cache.stores for x in store.tensors]
    with pytest.raises(UserError, match=words):
        run.model(tokens(batch, t), cache=run.cache, lens=lens, rows=rows)
    assert all(map(torch.equal, before, (x for store in run.cache.stores for x in store.tensors)))
    run.step([1, 2, 3])


@pytest.mark.parametrize('name', ['rows', 'lens'])
def test_rows_and_lens_without_a_cache_are_refused(name):
    with pytest.raises(UserError, match=rf'{name}=\[0\]'):
        random_model(STACK)(tokens(1, 4), **{name: [0]})


@KINDS
def test_a_step_that_failed_midway_leaves_no_nan_beyond_the_lengths(paging, monkeypatch):
    run = Run(STACK, 2, 40, **paging)
    run.step([4, 4])
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(run.model.transformer.h[-1], 'forward',
                      lambda *_: (_ for _ in ()).throw(MemoryError()))
        run.step([9, 9], bad=[0, 1])
    run.reset(1)
    run.reset(0, 1)
    for lens in ([2, 1], [1, 1], [3, 4], [1, 1]):
        run.step(lens)


def test_a_row_is_emptied_no_further_than_it_was_written():
    """A reset does not touch memory that was never written, which may not be allocated yet."""
    cache = random_model(STACK).new_cache(2, 40)
    for store in cache.stores:
        fill_random(store)
    random = [store.tensors[1].clone() for store in cache.stores]
    feed(cache=cache, model=random_model(STACK), idx=tokens(2, 3), chunks=[3])
    cache.reset([1])
    for store, before in zip(cache.stores, random):
        assert torch.equal(store.tensors[1][:, :, 3:], before[:, :, 3:])
        assert store.tensors[1][0, :, :3].abs().min() > 0 == store.tensors[1][1, :, :3].abs().max()
