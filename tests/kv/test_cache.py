"""What a cache stores and allocates, and rows that are refused, fail midway or are reset. (That its
logits are those of a full forward: `tests/test_equivalence.py`.)"""
import gc

import numpy as np
import pytest
import torch

from attention.cached import tiles
from common.errors import UserError
from common.gpt_config import GPTConfig
from engine.pages.cache import PagedKVCache
from kv.cache import KVCache, on_device
from kv.report import account
from lab.benchmarks.kernels import fill_random
from tests.helpers.models import (
    FULL_STACK, VOCAB, Largest, feed, full_logits, max_gap, random_model, tokens)
from tests.helpers.reference import Reference
from tests.helpers.runs import Run
from training.step.kernels import prepare

STACK = GPTConfig(**FULL_STACK)
VANILLA = dict(n_layer=2, n_head=4, n_embd=24, block_size=64, vocab_size=VOCAB)
# contiguous, and paged with a pool that never runs out
PAGES = dict(cache_class=PagedKVCache, n_pages=100, page_size=3)
PAGING = pytest.mark.parametrize('paging', [{}, PAGES], ids=['contiguous', 'paged'])


def test_rope_goes_past_block_size():
    model, idx = random_model(GPTConfig(**FULL_STACK | dict(block_size=16))), tokens(1, 300)
    cached = feed(model, model.new_cache(1, 300), idx, [250] + [1] * 10 + [40])
    assert max_gap(cached, Reference(model.state_dict(), model.config)(idx)) < 1e-9


# -- other storage dtypes --------------------------------------------------------------------------

# RMS of the change of the logits over RMS of the logits; about 3x what four seeds gave
STORAGE_BOUNDS = {'float32': 1.2e-7, 'float16': 1e-3, 'bfloat16': 8e-3, 'int8': 2e-2, 'int4': 0.3}


@pytest.mark.parametrize('key_offset', [False, True])
@pytest.mark.parametrize('kv_dtype', STORAGE_BOUNDS)
def test_rounded_storage_is_invariant_to_chunking_and_close_to_full_precision(kv_dtype, key_offset):
    """The state of offset keys is not quantized (float32 here, in a float64 model)."""
    fields = FULL_STACK | dict(head_dim=8, key_offset=True) if key_offset else FULL_STACK
    model, idx = random_model(GPTConfig(**fields)), tokens(4, 60)
    full = full_logits(model, idx)
    once, *others = (feed(model, model.new_cache(4, 60, kv_dtype=kv_dtype), idx, chunks)
                     for chunks in ([60], [30] + [1] * 30, [4, 1, 5, 6, 1, 43]))
    if not key_offset:
        assert 0 < ((once - full).norm() / full.norm()).item() < STORAGE_BOUNDS[kv_dtype]
    bound = 1e-5 if key_offset and kv_dtype in ('int8', 'int4') else 1e-9
    assert all(max_gap(other, once) < bound for other in others)


def test_a_model_trained_with_int8_attends_to_what_its_int8_cache_stores():
    """Also of the newest tokens."""
    model = random_model(GPTConfig(**FULL_STACK, kv_quant_train='int8'))
    idx = tokens(2, 40)
    cached = feed(model, model.new_cache(2, 40, 'int8'), idx, [17] + [1] * 10 + [13])
    assert max_gap(cached, full_logits(model, idx)) < 1e-9


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

@pytest.fixture
def only_new_objects():
    """`gc.get_objects` finds those made from now on: all others are many, and it takes a second to
    look at them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live_bytes():
    gc.collect()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                for x in gc.get_objects()
                if type(x) is torch.Tensor and x.device.type == 'cpu' and x.layout == torch.strided}
    return sum(storages.values())


@pytest.mark.parametrize('kv_dtype', ['bfloat16', 'int8'])
def test_a_cache_takes_what_its_plan_says_and_steps_allocate_nothing_that_stays(
        kv_dtype, only_new_objects):
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


# 2 K/V heads of 8 in local slots, 16 positions of 5 in rings
HEADS = dict(block_size=40, vocab_size=23, n_layer=4, n_head=4, n_embd=32, n_kv_head=2,
             layer_pattern='LG', window_size=5, pos_embedding='rope', qk_norm=True)
# bytes of a number, and of a vector's scale
ELEMENTS = {'float64': (8, 0), 'float32': (4, 0), 'bfloat16': (2, 0), 'float16': (2, 0),
            'int8': (1, 2), 'int4': (0.5, 2)}


@pytest.mark.parametrize('changes, local, of_global, state', [
    (dict(), 2 * 2 * 8, 2 * 2 * 8, 0),
    (dict(attn_sink=True, gelu='relu2', rope_fraction_global=0.5), 32, 32, 0),
    (dict(kv_tied='global'), 32, 16, 0),
    (dict(kv_tied='all'), 16, 16, 0),
    (dict(kv_latent=24, rope_fraction_global=0.0), 32, 24, 0),
    (dict(key_offset=True), 32, 32, 2 * 4),
])
def test_bytes_of_a_sequence(changes, local, of_global, state):
    """local, of_global: numbers stored per position and slot. state: numbers per global slot."""
    model = random_model(GPTConfig(**HEADS | changes), torch.float32)
    for kv_dtype, (element, scale) in ELEMENTS.items():
        heads = {'local': local // 8, 'global': 1 if 'kv_latent' in changes else of_global // 8}
        expected = 2 * 5 * (local * element + heads['local'] * scale)
        expected += 2 * 40 * (of_global * element + heads['global'] * scale)
        expected += 2 * state * (4 if scale else element)
        assert model.plan.nbytes(1, 40, kv_dtype) == expected
        assert model.new_cache(3, 40, kv_dtype).nbytes == 3 * expected
        numbers = account(model.plan, 1, 40, kv_dtype)
        assert sum(slot['bytes'] for slot in numbers['slots']) == expected


def test_int4_takes_pairs():
    model = random_model(GPTConfig(**HEADS | dict(head_dim=7, pos_embedding='learned')))
    with pytest.raises(UserError, match='int4.*head_dim=7 is odd'):
        model.new_cache(1, 8, 'int4')


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


# -- rows ------------------------------------------------------------------------------------------

@PAGING
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


@PAGING
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


# -- within a step ---------------------------------------------------------------------------------

@pytest.mark.parametrize('t', [1, 3])
@pytest.mark.parametrize('ragged', [False, True])
def test_an_int8_cache_is_decoded_a_tile_at_a_time(monkeypatch, t, ragged):
    """No operation returns a decoded copy of a slot: all tensors are much smaller than that."""
    monkeypatch.setattr(tiles, '__defaults__', (256,))
    model = random_model(GPTConfig(**FULL_STACK | dict(block_size=1024)))
    prepare(model, 1000)  # rotary tables are not part of the step
    cache = model.new_cache(4, 1000, 'int8').fill_(990)
    if ragged:
        cache.reset([1])
        model(tokens(4, 9), cache=cache, lens=[0, 9, 0, 0])
    with Largest() as largest, torch.no_grad():
        model(tokens(4, t), cache=cache)
    held = 4 * 990 * model.plan.head_dim  # elements of K in the global slot
    assert 256 <= largest.n <= held / 5


@pytest.mark.parametrize('at_the_logits', [False, True])
def test_after_a_failure_tokens_do_not_count_and_rows_may_be_reset_one_by_one(monkeypatch,
                                                                              at_the_logits):
    model, idx = random_model(GPTConfig(**FULL_STACK)), tokens(3, 20)
    cache = model.new_cache(3, 40)
    feed(model, cache, idx[:, :9], [9])
    failing = model.lm_head if at_the_logits else model.transformer.h[4]
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(failing, 'forward', lambda *_: (_ for _ in ()).throw(MemoryError()))
        model(idx[1:, :2], cache=cache, rows=[1, 2])
    assert cache.lengths.tolist() == [9, 9, 9]
    cache.reset([1])
    with pytest.raises(UserError, match='reset'):
        model(idx[:1, 9:10], cache=cache, rows=[0])
    cache.reset([2])
    logits = model(idx[:1, 9:10], cache=cache, rows=[0])[0]  # row 0 was not part of that step
    assert max_gap(logits, full_logits(model, idx[:1, :10])[:, -1:]) < 1e-9
    assert cache.lengths.tolist() == [10, 0, 0]


def test_keys_are_dropped_after_their_last_reader():
    """A prompt's K and V of a slot are not kept until the end of the forward pass."""
    model = random_model(GPTConfig(**FULL_STACK))
    cache, held = model.new_cache(1, 40), []
    plain = cache.attend
    cache.attend = lambda layer, *args: (plain(layer, *args),
                                         held.append((layer, set(cache._visible))))[0]
    model(tokens(1, 20), cache=cache)
    for layer, slots in held:
        assert slots == {s.index for s in model.plan.slots if s.owner <= layer.index < s.layers[-1]}


@pytest.mark.parametrize('kind', [FULL_STACK, VANILLA], ids=['full stack', 'vanilla'])
@PAGING
@pytest.mark.parametrize('kv_dtype', ['auto', 'int8'])
def test_ragged_prompts_chunks_and_decode_under_autocast(kind, paging, kv_dtype):
    """Autocast once made the scores bfloat16, which overflowed ("value cannot be converted")."""
    model, idx = random_model(GPTConfig(**kind), torch.float32), tokens(2, 14)
    plain, cast = (model.new_cache(2, 30, kv_dtype, **paging) for _ in range(2))
    with torch.no_grad():
        for a, b, lens in ((0, 5, [5, 3]), (5, 9, [4, 2]), (9, 10, [1, 1]), (10, 11, [0, 1]),
                           (11, 14, [3, 3])):
            expected = model(idx[:, a:b], cache=plain, lens=lens, all_logits=True)[0]
            with torch.autocast('cpu', torch.bfloat16):
                logits = model(idx[:, a:b], cache=cast, lens=lens, all_logits=True)[0]
            for row, n in enumerate(lens):
                if n:
                    error = (logits[row, :n].float() - expected[row, :n]).abs().mean()
                    assert error < 0.1 * expected.std()
    assert cast.lengths.tolist() == plain.lengths.tolist() == [13, 10]


@PAGING
def test_a_wrong_id_leaves_the_cache_as_it_was(paging):
    """It used to be marked "half-written", which ended the conversation, with nothing written."""
    model, idx = random_model(GPTConfig(**FULL_STACK)), tokens(1, 12)
    cache = model.new_cache(1, 20, **paging)
    feed(model, cache, idx[:, :7], [7])
    with pytest.raises(IndexError):
        model(torch.tensor([[VOCAB]]), cache=cache)
    assert cache.lengths.tolist() == [7]
    assert max_gap(feed(model, cache, idx[:, 7:], [1, 4]), full_logits(model, idx)[:, 7:]) < 1e-9


@PAGING
@pytest.mark.parametrize('made_within', [False, True])
def test_a_cache_used_under_inference_mode_is_good_outside_of_it(paging, made_within):
    """"Inplace update to inference tensor outside InferenceMode": resetting a row writes zeros. A
    step with gradients on keeps no graph."""
    model, idx = random_model(GPTConfig(**FULL_STACK)), tokens(2, 12)
    with torch.inference_mode(made_within):
        cache = model.new_cache(2, 20, **paging)
    with torch.inference_mode():
        feed(model, cache, idx[:, :3], [2, 1])
    logits = [model(idx[:, a:b], cache=cache, all_logits=True)[0] for a, b in ((3, 4), (4, 12))]
    assert max_gap(torch.cat(logits, dim=1), full_logits(model, idx)[:, 3:]) < 1e-9
    assert not any(x.requires_grad for store in cache.stores for x in store.tensors)
    cache.reset([1])
    cache.reset()
    assert max_gap(feed(model, cache, idx, [5, 7]), full_logits(model, idx)) < 1e-9


def test_learned_positions_end_at_block_size():
    model = random_model(GPTConfig(block_size=8, vocab_size=20, n_layer=2, n_head=2, n_embd=12))
    with pytest.raises(UserError, match='max_seq_len=9.*block_size=8'):
        model.new_cache(1, 9)
    with pytest.raises(UserError, match='9 tokens.*block_size=8'):
        model(torch.zeros(1, 9, dtype=torch.long))
    assert model.new_cache(1, 8).max_seq_len == 8
    cache = KVCache(model.plan, 2, 20, 'float64', torch.float64)
    model(torch.zeros(2, 6, dtype=torch.long), cache=cache, lens=[6, 3])
    model(torch.zeros(2, 5, dtype=torch.long), cache=cache, lens=[2, 5])  # up to 8, padding beyond
    with pytest.raises(UserError, match='sequence of 9 tokens'):
        model(torch.zeros(2, 1, dtype=torch.long), cache=cache, lens=[0, 1])
    assert cache.lengths.tolist() == [8, 8]
