"""The page table on the device: equal to the cache's, although only changes are sent."""
import contextlib
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from config.gpt_config import GPTConfig
from engine.pages.cache import PagedKVCache
from engine.pages.table import OutOfPages
from engine.steps.static import StaticCache
from kv.plan import plan_kv
from tests.helpers.models import FULL_STACK, max_gap, random_model, tokens

N_ROWS, ROOM = 5, 24
ROW, VIEW = st.integers(0, N_ROWS - 1), st.integers(0, 3)
PLAN = plan_kv(GPTConfig(n_layer=1, n_head=1, n_embd=2, block_size=32, vocab_size=8,
                         layer_pattern='G'))


def whole(cache, n_rows):
    """The table of the first rows, built from scratch."""
    width = cache.table.pages_for(cache.max_seq_len)
    return [pages + [-1] * (width - len(pages)) for pages in cache.table.rows[:n_rows]]


class Tables(RuleBasedStateMachine):
    """Any sequence of operations on a cache; static caches of several sizes update their tables
    from time to time."""

    @initialize(n_pages=st.integers(4, 40), page_size=st.sampled_from([1, 2, 3]))
    def start(self, n_pages, page_size):
        self.cache = PagedKVCache(PLAN, N_ROWS, ROOM, n_pages, page_size)
        self.views = [StaticCache(self.cache, n) for n in (5, 4, 2, 1)]
        self.addresses = [view.block_table.data_ptr() for view in self.views]

    @rule(row=ROW, length=st.integers(0, ROOM), interrupted=st.booleans())
    def reserve(self, row, length, interrupted):
        """Reserve pages, or press Ctrl-C after the first, which the row then keeps."""
        table, take, left = self.cache.table, self.cache.table._take, iter(range(1))

        def interrupted_take():
            if next(left, None) is None:
                raise KeyboardInterrupt
            return take()
        with mock.patch.object(table, '_take', interrupted_take if interrupted else take):
            try:
                self.cache.reserve(row, length)
            except OutOfPages:
                pass
            except KeyboardInterrupt:
                table.rebuild(set())

    @rule(rows=st.lists(ROW, min_size=1, max_size=N_ROWS, unique=True))
    def release(self, rows):
        self.cache.reset(rows)

    @rule(source=ROW, to=ROW)
    def move(self, source, to):
        self.cache.move(source, to)

    @rule(view=VIEW)
    def interrupted_update(self, view):
        """Ctrl-C after the entries were written, but before `set` has recorded it."""
        put = torch.Tensor.__setitem__

        def interrupted(*args):
            put(*args)
            raise KeyboardInterrupt
        with (mock.patch.object(torch.Tensor, '__setitem__', interrupted),
              contextlib.suppress(KeyboardInterrupt)):
            self.views[view].set([None])

    @rule(view=VIEW)
    def update(self, view):
        view, address = self.views[view], self.addresses[view]
        view.set([None])
        assert view.block_table.tolist() == whole(self.cache, view.batch_size)
        assert view.block_table.data_ptr() == address  # a CUDA graph keeps it

    @invariant()
    def the_largest_is_up_to_date(self):
        if hasattr(self, 'views'):
            self.update(0)

    def teardown(self):
        for view in range(len(getattr(self, 'views', []))):
            self.update(view)


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=150, stateful_step_count=30)


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
