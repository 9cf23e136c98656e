"""The page table on the device: equal to the cache's, although only changes are sent."""
import contextlib
import random

import pytest
import torch

from config.gpt_config import GPTConfig
from engine.pages.cache import PagedKVCache
from engine.pages.table import OutOfPages
from engine.steps.static import StaticCache
from kv.plan import plan_kv
from tests.helpers.models import FULL_STACK, max_gap, random_model, tokens

N_ROWS, ROOM = 5, 24
PLAN = plan_kv(GPTConfig(n_layer=1, n_head=1, n_embd=2, block_size=32, vocab_size=8,
                         layer_pattern='G'))


def whole(cache, n_rows):
    """The table of the first rows, built from scratch."""
    width = cache.table.pages_for(cache.max_seq_len)
    return [pages + [-1] * (width - len(pages)) for pages in cache.table.rows[:n_rows]]


def test_the_table_on_the_device_is_that_of_the_cache(monkeypatch):
    """Whatever was done to rows since the last update, also if that was interrupted."""
    cache, draw = PagedKVCache(PLAN, N_ROWS, ROOM, n_pages=30, page_size=3), random.Random(1)
    views = [StaticCache(cache, n) for n in (5, 4, 1)]
    addresses = [view.block_table.data_ptr() for view in views]  # a CUDA graph keeps them
    put = torch.Tensor.__setitem__

    def interrupted(*args):
        put(*args)
        raise KeyboardInterrupt
    for _ in range(300):
        row, other, view = draw.randrange(N_ROWS), draw.randrange(N_ROWS), draw.choice(views)
        what = draw.choice(['reserve', 'reserve', 'release', 'move', 'interrupted update'])
        with contextlib.suppress(OutOfPages, KeyboardInterrupt), monkeypatch.context() as patch:
            if what == 'reserve':
                cache.reserve(row, draw.randint(0, ROOM))
            elif what == 'release':
                cache.reset([row])
            elif what == 'move':
                cache.move(row, other)
            else:
                patch.setattr(torch.Tensor, '__setitem__', interrupted)
                view.set([None])
        view.set([None])
        assert view.block_table.tolist() == whole(cache, view.batch_size)
    assert [view.block_table.data_ptr() for view in views] == addresses


@pytest.mark.parametrize('paged', [False, True])
def test_a_static_step_under_autocast_is_the_ordinary_one(paged):
    """Autocast would make the scores bfloat16, which cannot be combined with the stored float32."""
    model = random_model(GPTConfig(**FULL_STACK), torch.float32)
    pages = dict(cache_class=PagedKVCache, n_pages=20, page_size=4) if paged else {}
    caches = [model.new_cache(2, 20, **pages) for _ in 'ab']
    with torch.inference_mode(), torch.autocast('cpu', torch.bfloat16):
        for cache in caches:
            model(tokens(2, 6), cache=cache)
        if paged:
            caches[0].reserve(0, 7), caches[0].reserve(1, 7)
        view = StaticCache(caches[0], 2)
        view.set([6, 6])
        found, expected = (model(tokens(2, 1), cache=c)[0] for c in (view, caches[1]))
    assert max_gap(found.float(), expected.float()) < 1e-2 * expected.float().abs().max()
