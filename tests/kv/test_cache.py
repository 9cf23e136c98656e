"""Cached logits equal a full forward for every plan and chunking; bytes equal the plan's."""
import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import UserError
from config.gpt_config import GPTConfig
from kv.cache import KVCache, on_device
from kv.plan import KV_DTYPES, plan_kv
from tests.helpers.models import (
    FULL_STACK, chunkings, configs, feed, full_logits, max_gap, random_model, tokens)
from tests.helpers.reference import Reference

pytestmark = pytest.mark.filterwarnings('ignore:layer_pattern')


def past_two_wraps(draw, config):
    return 2 * max(config.window_size, 3) + draw(st.integers(1, 12))


# -- cached equals uncached ------------------------------------------------------------------------

@pytest.mark.parametrize('fields, kv_dtypes', [
    ({}, ['auto']), (dict(kv_quant_train='int8', key_offset=False), ['int8', 'float64'])],
    ids=['float64', 'rounded to int8'])
@settings(max_examples=70)
@given(data=st.data(), batch=st.integers(1, 3))
def test_cached_equals_full_forward_equals_reference(fields, kv_dtypes, data, batch):
    """With int8, queries attend to the stored values, including those of the newest tokens."""
    config = data.draw(configs(**fields))
    T = past_two_wraps(data.draw, config)
    model, idx = random_model(config), tokens(batch, T)
    full = full_logits(model, idx)
    assert max_gap(full, Reference(model.state_dict(), config)(idx)) < 1e-9
    for kv_dtype in kv_dtypes:
        cache = model.new_cache(batch, T + data.draw(st.integers(0, 5)), kv_dtype)
        assert max_gap(feed(model, cache, idx, data.draw(chunkings(T))), full) < 1e-9
        assert cache.lengths.tolist() == [T] * batch


def test_rope_goes_past_block_size():
    model, idx = random_model(GPTConfig(**FULL_STACK | dict(block_size=16))), tokens(1, 300)
    cached = feed(model, model.new_cache(1, 300), idx, [250] + [1] * 10 + [40])
    assert max_gap(cached, Reference(model.state_dict(), model.config)(idx)) < 1e-9


# -- other storage dtypes --------------------------------------------------------------------------

# RMS of the change of the logits over RMS of the logits; about 3x what four seeds gave
STORAGE_BOUNDS = {'float32': 1.2e-7, 'float16': 1e-3, 'bfloat16': 8e-3, 'int8': 2e-2, 'int4': 0.3}


@pytest.mark.parametrize('kv_dtype', STORAGE_BOUNDS)
def test_rounded_storage_is_invariant_to_chunking_and_close_to_full_precision(kv_dtype):
    model, idx = random_model(GPTConfig(**FULL_STACK)), tokens(4, 60)
    full = full_logits(model, idx)
    once, *others = (feed(model, model.new_cache(4, 60, kv_dtype=kv_dtype), idx, chunks)
                     for chunks in ([60], [30] + [1] * 30, [4, 1, 5, 6, 1, 43]))
    assert 0 < ((once - full).norm() / full.norm()).item() < STORAGE_BOUNDS[kv_dtype]
    assert all(max_gap(other, once) < 1e-9 for other in others)


def test_bf16_model_is_close_to_its_own_full_forward():
    """bf16 has 8 significant bits: sums in a different order differ in a few of them."""
    model, idx = random_model(GPTConfig(**FULL_STACK), torch.bfloat16), tokens(2, 40)
    full = full_logits(model, idx).double()
    cached = feed(model, model.new_cache(2, 40), idx, [17] + [1] * 10 + [13])
    assert cached.dtype == torch.bfloat16
    assert ((cached - full).norm() / full.norm()).item() < 0.025


def test_numbers_of_any_kind_go_to_a_gpu_from_pinned_memory(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, 'pin_memory', lambda x: pinned.append(x) or x)
    monkeypatch.setattr(torch.Tensor, 'to', lambda x, device, non_blocking: x)
    for numbers in ([3, 4], [[1, 2], [3, 4]], np.arange(3), np.ones((2, 2))):
        for dtype in (torch.int64, torch.float64):
            x = on_device(numbers, torch.device('cuda'), dtype)
            assert x is pinned.pop() and x.dtype == dtype
            assert x.tolist() == np.array(numbers).tolist()


# -- bytes -----------------------------------------------------------------------------------------

def live_bytes():
    gc.collect()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                for x in gc.get_objects()
                if type(x) is torch.Tensor and x.device.type == 'cpu'}
    return sum(storages.values())


@pytest.mark.parametrize('kv_dtype', ['bfloat16', 'int8'])
def test_a_cache_takes_what_its_plan_says_and_steps_allocate_nothing_that_stays(kv_dtype):
    model, idx = random_model(GPTConfig(**FULL_STACK)), tokens(2, 30)
    feed(model, model.new_cache(2, 30), idx, [30])  # RoPE tables are made once
    before = live_bytes()
    cache = model.new_cache(2, 30, kv_dtype)
    grown = model.plan.nbytes(2, 30, kv_dtype)
    assert live_bytes() - before == cache.nbytes == grown
    with torch.no_grad():
        for at in range(10, 20):
            model(idx[:, at:at + 1], cache=cache)
        model(idx[:, 20:], cache=cache, lens=[10, 3])
    assert live_bytes() - before == grown
    cache.reset()
    assert live_bytes() - before == cache.nbytes == grown


@settings(max_examples=40)
@given(config=configs(), batch=st.integers(1, 3), max_seq_len=st.integers(1, 50),
       kv_dtype=st.sampled_from(list(KV_DTYPES)))
def test_allocated_equals_planned_for_any_plan(config, batch, max_seq_len, kv_dtype):
    plan = plan_kv(config)
    shape = batch, max_seq_len, kv_dtype
    assert KVCache(plan, *shape).nbytes == plan.nbytes(*shape)


# -- lengths, fill_, and what is refused -----------------------------------------------------------

@pytest.mark.parametrize('kv_dtype', ['float32', 'int8', 'bfloat16', 'int4'])
def test_fill_holds_random_keys_and_values_everywhere(kv_dtype):
    model = random_model(GPTConfig(**FULL_STACK | dict(block_size=1024)), torch.float32)
    cache = model.new_cache(2, 600, kv_dtype=kv_dtype)
    assert cache.fill_(599) is cache
    assert cache.lengths.tolist() == [599, 599]
    assert cache.nbytes == model.plan.nbytes(2, 600, kv_dtype)
    for store in cache.stores:
        for x in store.tensors:
            assert (x[:, :, :599] != 0).any(-1).all()
    with torch.no_grad():
        assert model(tokens(2, 1), cache=cache)[0].isfinite().all()
        with pytest.raises(ValueError):
            model(tokens(2, 1), cache=cache)


CACHE = dict(batch_size=3, max_seq_len=8)


@pytest.mark.parametrize('arguments, call, words', [
    (dict(kv_dtype='int3'), None, "'int3'.*'int8'"), (dict(batch_size=0), None, 'batch_size=0'),
    (dict(max_seq_len=0), None, 'max_seq_len=0'),
    *[({}, lambda model, cache, rows=rows: cache.reset(rows), '0 to 2')
      for rows in ([3], [-1], [True, False, True], [0, 7])],
    ({}, lambda model, cache: cache.reset(1), r'reset\(1\).*reset\(\[1\]\)'),
    ({}, lambda model, cache: cache.fill_(-1), '-1.*8'),
    ({}, lambda model, cache: cache.fill_(9), '9.*8'),
    ({}, lambda model, cache: model(tokens(3, 4), tokens(3, 4), cache=cache), 'targets'),
    ({}, lambda model, cache: model.train()(tokens(3, 4), cache=cache), 'eval')])
def test_what_is_refused(arguments, call, words):
    model = random_model(GPTConfig(**FULL_STACK))
    if call is None:
        with pytest.raises(UserError, match=words):
            model.new_cache(**CACHE | arguments)
        return
    cache = model.new_cache(**CACHE)
    model(tokens(3, 4), cache=cache)
    with pytest.raises(ValueError, match=words):
        call(model, cache)
    assert cache.lengths.tolist() == [4, 4, 4]
