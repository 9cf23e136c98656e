"""Steps over some rows of a cache in any order, moved rows, and NaN, which must not spread."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import UserError
from config.gpt_config import GPTConfig
from engine.pages.cache import PagedKVCache
from lab.benchmarks.kernels import fill_random
from tests.helpers.models import FULL_STACK, configs, feed, random_model, tokens
from tests.helpers.runs import Run

pytestmark = pytest.mark.filterwarnings('ignore:layer_pattern')
STACK = GPTConfig(**FULL_STACK)
# contiguous, and paged with a pool that never runs out
PAGES = dict(cache_class=PagedKVCache, n_pages=100, page_size=3)
KINDS = pytest.mark.parametrize('paging', [{}, PAGES], ids=['contiguous', 'paged'])


def past_two_wraps(config):
    return 2 * max(config.window_size, 4) + 9


@settings(max_examples=40)
@given(data=st.data(), config=configs(windows=(1, 2, 3, 5, 8)), batch=st.integers(1, 4))
def test_any_steps_over_any_rows_equal_each_row_alone(data, config, batch):
    Run(config, batch, past_two_wraps(config)).anything(data)


@pytest.mark.parametrize('fields, kwargs', [
    (dict(kv_quant_train='int8'), dict(kv_dtype='int8')),
    ({}, dict(dtype=torch.float32, bound=1e-4))], ids=['int8', 'float32'])
@settings(max_examples=15)
@given(data=st.data(), batch=st.integers(2, 4))
def test_any_steps_over_any_rows_in_other_dtypes(fields, kwargs, data, batch):
    config = data.draw(configs(windows=(1, 2, 3, 5, 8), **fields))
    Run(config, batch, past_two_wraps(config), **kwargs).anything(data)


@KINDS
def test_wrong_rows_are_refused_before_anything_is_written(paging):
    run = Run(STACK, 3, 20, **paging)
    run.step([4, 4, 4])
    for n_rows, rows, named in (
            (2, [1, 1], r'\[1, 1\].*once'), (1, [3], 'row 3.*0 to 2'), (1, [-1], 'row -1.*0 to 2'),
            (1, [True], 'row True.*0 to 2'), (1, [0.0], 'row 0.0.*0 to 2'),
            (2, [0], r'2 rows.*\[0\]'), (1, [0, 1], r'1 rows.*\[0, 1\]'),
            (0, [], r'\[\].*at least one')):
        with pytest.raises(UserError, match=named):
            run.model(tokens(n_rows, 2), cache=run.cache, rows=rows)
    run.step([1, 1, 1])


@pytest.mark.parametrize('name', ['rows', 'lens'])
def test_rows_and_lens_without_a_cache_are_refused(name):
    with pytest.raises(UserError, match=rf'{name}=\[0\]'):
        random_model(STACK)(tokens(1, 4), **{name: [0]})


# -- move ------------------------------------------------------------------------------------------

def test_a_move_of_rows_that_are_none_is_refused():
    run = Run(STACK, 3, 20, **PAGES)
    run.step([3, 3, 3])
    for source, target in ((0, 3), (-1, 0), (3, 0), (0, True)):
        with pytest.raises(UserError, match='move: row .*0 to 2'):
            run.cache.move(source, target)
    run.step([1, 1, 1])


# -- NaN -------------------------------------------------------------------------------------------

@pytest.mark.parametrize('kv_dtype', ['auto', 'int8'])
@pytest.mark.parametrize('paging, left', [
    ({}, 'reset'), ({}, 'reset all'), (PAGES, 'reset'), (PAGES, 'reset all'), (PAGES, 'moved away'),
    (PAGES, 'moved over')])
def test_a_reused_row_that_held_nan_has_none(paging, kv_dtype, left):
    """A masked key has weight 0, and 0 * NaN is NaN: old values must not stay in a reused row."""
    run = Run(GPTConfig(**FULL_STACK, kv_quant_train=kv_dtype.removeprefix('auto')), 3, 40,
              kv_dtype, **paging)
    run.step([23, 9, 17], bad=[0])
    if left == 'reset':
        run.reset(0)
    elif left == 'reset all':
        run.reset(0, 1, 2)
    elif left == 'moved away':
        run.move(0, 1)
    else:
        run.move(1, 0)
    for lens in ([2, 1, 1], [1, 1, 1], [1, 0, 1], [3, 3, 2], [1, 1, 1], [6, 1, 6], [1, 1, 1]):
        run.step(lens)


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
