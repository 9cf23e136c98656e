"""A cache in pages: its logits are those of a full forward whatever is done to it, and it holds no
more than it says."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import UserError
from config.gpt_config import GPTConfig
from engine.paged import PagedKVCache, PagedStore, table_attention
from engine.pages import OutOfPages, PageTable
from engine.static import put
from tests.helpers.models import (
    FULL_STACK,
    chunkings,
    configs,
    feed,
    full_logits,
    max_gap,
    random_model,
    tokens,
)
from tests.helpers.reference import dense_attention
from tests.helpers.runs import Run

pytestmark = pytest.mark.filterwarnings('ignore:layer_pattern')
STACK = GPTConfig(**FULL_STACK)
SIZES = (1, 2, 3, 7, 64)  # of pages


def past_two_wraps(config):
    return 2 * max(config.window_size, 4) + 9


def pages_for(n, page_size):
    return (n + page_size - 1) // page_size


def ample(batch, room, page_size):
    return dict(cache_class=PagedKVCache, n_pages=batch * pages_for(room, page_size),
                page_size=page_size)


# -- logits ----------------------------------------------------------------------------------------

@settings(max_examples=40)
@given(data=st.data(), config=configs(windows=(1, 2, 3, 5, 8)), batch=st.integers(1, 4),
       page_size=st.sampled_from(SIZES))
def test_anything_done_to_a_paged_cache_equals_each_row_alone(data, config, batch, page_size):
    """Ragged chunks, some rows, resets, moves, forks of which both go on, rows that are NaN; past
    two window wraps."""
    room = past_two_wraps(config)
    Run(config, batch, room, **ample(batch, room, page_size)).anything(data, can_fork=True)


@pytest.mark.parametrize('rounded, kind', [
    (True, dict(kv_dtype='int8')), (False, dict(dtype=torch.float32, bound=1e-4))])
@settings(max_examples=12)
@given(data=st.data(), page_size=st.sampled_from(SIZES))
def test_anything_done_to_a_paged_cache_in_other_dtypes(rounded, kind, data, page_size):
    quantized = dict(kv_quant_train='int8') if rounded else {}
    config = data.draw(configs(windows=(1, 3, 5), **quantized))
    room = past_two_wraps(config)
    Run(config, 3, room, **kind, **ample(3, room, page_size)).anything(data, can_fork=True)


@settings(max_examples=25)
@given(data=st.data(), config=configs(windows=(1, 2, 5, 8)), page_size=st.sampled_from(SIZES),
       kv_dtype=st.sampled_from(['auto', 'float32', 'bfloat16', 'int8']))
def test_paged_equals_contiguous_in_any_dtype_and_chunking(data, config, page_size, kv_dtype):
    T = past_two_wraps(config)
    model, idx = random_model(config), tokens(2, T)
    chunks = data.draw(chunkings(T))
    contiguous = feed(model, model.new_cache(2, T, kv_dtype), idx, chunks)
    paged = model.new_cache(2, T, kv_dtype, **ample(2, T, page_size))
    assert max_gap(feed(model, paged, idx, chunks), contiguous) < 1e-9
    if kv_dtype == 'auto':
        assert max_gap(contiguous, full_logits(model, idx)) < 1e-9


def test_a_half_precision_model_is_close_to_its_contiguous_cache():
    model, idx = random_model(STACK, torch.bfloat16), tokens(2, 40)
    once = feed(model, model.new_cache(2, 40), idx, [17] + [1] * 10 + [13]).double()
    paged = feed(model, model.new_cache(2, 40, **ample(2, 40, 3)), idx, [17] + [1] * 10
                 + [13]).double()
    assert ((paged - once).norm() / once.norm()).item() < 0.025


def test_only_the_last_logits_unless_all_are_asked_for():
    model, idx = random_model(STACK), tokens(3, 9)
    cache = model.new_cache(3, 12, cache_class=PagedKVCache, n_pages=20, page_size=2)
    with torch.no_grad():
        logits, _ = model(idx, cache=cache, lens=[2, 9, 5])
    for b, n in enumerate([2, 9, 5]):
        assert max_gap(logits[b, 0], full_logits(model, idx)[b, n - 1]) < 1e-9


@pytest.mark.parametrize('page_size', SIZES)
def test_rows_wait_while_others_are_decoded(page_size):
    run = Run(STACK, 4, 40, **ample(4, 40, page_size))
    run.step([5, 0, 17, 11])
    for lens in ([1, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 7, 0, 2],
                 [1, 0, 1, 1]):
        run.step(lens, t=max(*lens, 1))


def test_a_cache_may_be_used_with_gradients_on_and_keeps_no_graph():
    model, idx = random_model(STACK), tokens(2, 12)
    cache = model.new_cache(2, 20, cache_class=PagedKVCache, n_pages=20, page_size=2)
    for t in (4, 1, 1, 3, 1, 1, 1):
        model(idx[:, :t], cache=cache)
    assert not any(x.requires_grad for store in cache.stores for x in store.tensors)


def test_a_step_after_one_under_inference_mode():
    """The list of pages is kept from step to step, and tensors made in inference mode cannot enter
    a graph."""
    model, idx = random_model(STACK), tokens(2, 12)
    cache = model.new_cache(2, 20, cache_class=PagedKVCache, n_pages=20, page_size=8)
    with torch.inference_mode():
        model(idx[:, :2], cache=cache)
        model(idx[:, 2:3], cache=cache)
    logits, _ = model(idx[:, 3:4], cache=cache)
    assert max_gap(logits, full_logits(model, idx)[:, 3:4]) < 1e-9


# -- forks -----------------------------------------------------------------------------------------

def held_pages(cache):
    return cache.held_nbytes - cache.plan.rings_nbytes(cache.batch_size, cache.max_seq_len,
                                                       cache.kv_dtype)


@pytest.mark.parametrize('kv_dtype', ['auto', 'int8'])
@pytest.mark.parametrize('page_size', SIZES)
def test_forks_go_on_differently_and_hold_what_they_share_once(page_size, kv_dtype):
    config = GPTConfig(**FULL_STACK, kv_quant_train='int8' if kv_dtype == 'int8' else '')
    run = Run(config, 3, 40, kv_dtype, **ample(3, 40, page_size))
    page = run.model.plan.page_nbytes(page_size, run.cache.kv_dtype)

    def holds(*lengths):
        return held_pages(run.cache) == page * sum(pages_for(n, page_size) for n in lengths)

    run.step([13, 0, 0])
    run.fork(0, 1)
    run.fork(0, 2)
    assert holds(13)
    assert run.cache.lengths.tolist() == [13, 13, 13]
    # tokens differ from here on: the page that 13 lies in is written by all three
    run.step([1, 1, 1])
    whole = 13 // page_size
    assert held_pages(run.cache) == page * (whole + 3 * (pages_for(14, page_size) - whole))
    run.step([6, 1, 3])
    for _ in range(4):
        run.step([1, 1, 1])
    run.reset(0)
    run.step([1, 1, 1])
    run.reset(1)
    run.reset(2)
    assert holds(1)


def test_one_branch_goes_on_while_the_other_waits():
    run = Run(STACK, 2, 40, **ample(2, 40, 4))
    run.step([10, 0])
    run.fork(0, 1)
    for _ in range(14):
        run.step([0, 1])
    run.step([1, 1])
    run.step([3, 5])


def test_a_fork_onto_a_row_that_holds_something_changes_nothing():
    run = Run(STACK, 3, 40, **ample(3, 40, 4))
    run.step([10, 5, 0])
    for source, target, named in [(0, 1, 'row 1 holds 5 tokens'), (0, 0, 'row 0 holds 10'),
                                  (0, 3, 'row 3'), (-1, 2, 'row -1')]:
        with pytest.raises(UserError, match=named):
            run.cache.fork(source, target)
    run.cache.reserve(2, 5)
    with pytest.raises(UserError, match='row 2 holds 2 pages'):
        run.cache.fork(0, 2)
    run.step([1, 1, 1])


def test_a_fork_of_nothing_holds_nothing():
    run = Run(STACK, 2, 40, **ample(2, 40, 4))
    run.fork(0, 1)
    run.step([3, 5])


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
    run.step([1, 0, 1])      # there is room in the last pages of these
    run.step([2, 0], rows=[0, 1])
    run.reset(2)
    run.step([0, 4, 0])
    with pytest.raises(OutOfPages):
        run.step([1, 0, 1])
    run.reset(0)
    run.step([3, 0, 8])


def test_a_copy_of_a_shared_page_needs_a_page_too():
    run = Run(STACK, 3, 40, n_pages=3, page_size=4)
    run.step([7, 0, 0])
    run.fork(0, 1)
    run.fork(0, 2)
    with pytest.raises(OutOfPages, match='2 more pages .* 1 of 3'):
        run.step([1, 1, 1])
    run.step([1, 0, 0])      # a copy, and the last free page
    with pytest.raises(OutOfPages):
        run.step([0, 1, 0])
    run.reset(0)
    run.step([0, 1, 1])      # the last holder writes where it is


@pytest.mark.parametrize('page_size', SIZES)
def test_a_pool_just_large_enough_for_the_tokens_held(page_size):
    lengths = [14, 1, 22]
    n_pages = sum(pages_for(n, page_size) for n in lengths)
    run = Run(STACK, 3, 40, n_pages=n_pages, page_size=page_size)
    run.step([6, 1, 9])
    run.step([8, 0, 5])
    for _ in range(8):
        run.step([0, 0, 1])
    assert run.cache.table.n_free == 0
    assert run.cache.held_nbytes == run.cache.nbytes


def test_pages_are_freed_by_reset_and_by_moving_onto_a_row():
    run = Run(STACK, 3, 40, n_pages=12, page_size=4)
    run.step([9, 8, 5])
    assert run.cache.table.n_free == 12 - 3 - 2 - 2
    run.reset(1)
    assert run.cache.table.n_free == 7
    run.move(2, 0)
    assert run.cache.table.n_free == 10 and run.cache.table.rows == [[5, 6], [], []]
    run.step([30, 1, 1])
    with pytest.raises(UserError, match='row 3'):
        run.cache.reset([0, 3])
    assert run.cache.table.n_free == 12 - 9 - 2
    run.cache.reset()
    assert run.cache.table.n_free == 12 and run.cache.lengths.tolist() == [0, 0, 0]
    assert held_pages(run.cache) == 0


def test_reserved_pages_are_the_rows_own():
    run = Run(STACK, 3, 40, n_pages=7, page_size=4)
    run.step([5, 3, 0])
    run.cache.reserve(0, 18)
    assert run.cache.table.n_free == 7 - 5 - 1 and run.cache.lengths.tolist() == [5, 3, 0]
    run.step([1, 1, 1])
    with pytest.raises(OutOfPages):
        run.step([1, 1, 0])
    with pytest.raises(OutOfPages):
        run.cache.reserve(2, 5)
    for _ in range(10):
        run.step([1, 0, 0])
    run.step([2, 0, 3])
    run.cache.reserve(0, 3)
    assert run.cache.table.n_free == 0
    run.reset(0)
    assert run.cache.table.n_free == 5


def test_a_reserve_of_a_fork_takes_its_copy_now():
    run = Run(STACK, 2, 40, n_pages=4, page_size=4)
    run.step([6, 0])
    run.fork(0, 1)
    run.cache.reserve(1, 7)
    assert run.cache.table.n_free == 1 and run.cache.table.rows == [[0, 1], [0, 2]]
    run.step([1, 1])


@pytest.mark.parametrize('row, length', [(-1, 4), (2, 4), (0, 41)])
def test_a_reserve_that_cannot_be_is_refused(row, length):
    cache = random_model(STACK).new_cache(2, 40, cache_class=PagedKVCache, n_pages=40, page_size=4)
    with pytest.raises(UserError, match=f'reserve: .*{max(row, length) if length > 40 else row}'):
        cache.reserve(row, length)
    assert cache.table.n_free == 40


def test_a_model_without_global_layers_needs_no_pages():
    run = Run(GPTConfig(**dict(FULL_STACK, layer_pattern='L', kv_share='')), 3, 40, n_pages=1,
              page_size=1)
    run.step([9, 2, 5])
    run.cache.reserve(1, 30)
    run.reset(0)
    run.fork(1, 0)
    run.step([1, 1, 1])
    run.step([6, 2, 0])
    assert run.cache.table.n_free == 1 and run.cache.held_nbytes == run.cache.nbytes
    run.cache.fill_(40)


# -- what others hold in the pool ------------------------------------------------------------------

@pytest.mark.parametrize('kv_dtype', ['auto', 'int8'])
@pytest.mark.parametrize('rows, one_slice',
                         [([0, 1, 2, 3, 4], True), ([4, 2, 3, 0], True), ([1], False),
                          ([0, 4], False)])
def test_decode_among_pages_of_others_that_are_nan(rows, one_slice, kv_dtype):
    """Rows take turns, so that their pages alternate. Few unowned pages are read over, more are
    gone around."""
    config = GPTConfig(**FULL_STACK, kv_quant_train='int8' if kv_dtype == 'int8' else '')
    run = Run(config, 5, 40, kv_dtype, n_pages=60, page_size=2)
    left_out = [row for row in range(5) if row not in rows]
    run.step([1, 1, 1, 1, 1], bad=left_out)
    for _ in range(9):
        run.step([1] * 5)
    runs, page_list = [], run.cache._page_list
    run.cache._page_list = lambda step: runs.append(page_list(step)) or runs[-1]
    for _ in range(3):
        run.step([1] * len(rows), rows)
        assert [lo is not None for _, _, lo in runs[-1].runs] == [one_slice]
    run.step([3] * len(rows), rows)
    if left_out:
        run.step([1 if row in rows else 0 for row in range(5)])
    run.reset(*left_out)
    run.step([4] * 5)
    run.step([1] * 5)


def test_a_chunk_beside_a_row_that_holds_less_reads_no_pages_of_others():
    run = Run(STACK, 3, 40, n_pages=40, page_size=2)
    run.step([9, 0, 0], bad=[0])  # page 0, which stands for pages that a row does not have, is NaN
    run.step([0, 8, 0])
    run.step([4, 5], rows=[1, 2])
    run.step([1, 1], rows=[2, 1])


def test_pages_that_were_reserved_or_freed_by_a_nan_row_are_clean():
    run = Run(STACK, 3, 40, n_pages=24, page_size=7)
    run.step([20, 3, 0], bad=[0])
    run.move(0, 2)
    run.reset(2)
    run.cache.reserve(1, 30)
    for lens in ([1, 1, 1], [1, 1, 1], [2, 9, 0], [1, 1, 1]):
        run.step(lens)


def test_a_token_that_goes_nowhere_leaves_a_page_that_another_writes_to_alone():
    """Rows that take no part have page -1, which is the last one, or a page that they share."""
    table, cpu = PageTable(1, 4, 2), torch.device('cpu')
    store = PagedStore(table, 4, 1, 2, 3, torch.float32, torch.float32, cpu)
    k = torch.arange(1.0, 10).view(3, 1, 1, 3)
    put(store, torch.tensor([3, -1, 3]), torch.tensor([0, -1, -1]), (k, -k))
    for x, wanted in zip(store.tensors, (k[0], -k[0])):
        assert torch.equal(x[3, :, :1], wanted) and x.count_nonzero() == 3


def test_where_a_row_has_no_page_nothing_is_gathered():
    """Not even page 0, whose NaN would outlive a weight of 0."""
    k = torch.arange(24.0).view(4, 1, 2, 3)
    k[0] = torch.nan
    q, table = torch.randn(2, 1, 1, 3), torch.tensor([[2, 1], [3, -1]], dtype=torch.int32)
    y = table_attention(q, (k, k), table, torch.tensor([3, 2]))
    first, second = torch.cat([k[2], k[1]], dim=1)[None, :, :3], k[3][None]
    assert torch.allclose(y, torch.cat([dense_attention(q[:1], first, first),
                                        dense_attention(q[1:], second, second)]).float())
