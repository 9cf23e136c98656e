"""Within a step of a cache: failures halfway, decoded copies, autocast, inference mode."""
import pytest
import torch

from attention.cached import tiles
from config.errors import UserError
from config.gpt_config import GPTConfig
from engine.pages.cache import PagedKVCache
from kv.cache import KVCache
from tests.helpers.models import (
    FULL_STACK, VOCAB, Largest, feed, full_logits, max_gap, random_model, tokens)
from training.run import prepare

VANILLA = dict(n_layer=2, n_head=4, n_embd=24, block_size=64, vocab_size=VOCAB)
KINDS = pytest.mark.parametrize('kind', [FULL_STACK, VANILLA], ids=['full stack', 'vanilla'])
PAGED = pytest.mark.parametrize('pages',
                                [{}, dict(cache_class=PagedKVCache, n_pages=40, page_size=4)],
                                ids=['contiguous', 'paged'])


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


@KINDS
@PAGED
@pytest.mark.parametrize('kv_dtype', ['auto', 'int8'])
def test_ragged_prompts_chunks_and_decode_under_autocast(kind, pages, kv_dtype):
    """Autocast once made the scores bfloat16, which overflowed ("value cannot be converted")."""
    model, idx = random_model(GPTConfig(**kind), torch.float32), tokens(2, 14)
    plain, cast = (model.new_cache(2, 30, kv_dtype, **pages) for _ in range(2))
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


@PAGED
def test_a_wrong_id_leaves_the_cache_as_it_was(pages):
    """It used to be marked "half-written", which ended the conversation, with nothing written."""
    model, idx = random_model(GPTConfig(**FULL_STACK)), tokens(1, 12)
    cache = model.new_cache(1, 20, **pages)
    feed(model, cache, idx[:, :7], [7])
    with pytest.raises(IndexError):
        model(torch.tensor([[VOCAB]]), cache=cache)
    assert cache.lengths.tolist() == [7]
    assert max_gap(feed(model, cache, idx[:, 7:], [1, 4]), full_logits(model, idx)[:, 7:]) < 1e-9


@PAGED
@pytest.mark.parametrize('made_within', [False, True])
def test_a_cache_used_under_inference_mode_is_good_outside_of_it(pages, made_within):
    """"Inplace update to inference tensor outside InferenceMode": resetting a row writes zeros. A
    step with gradients on keeps no graph."""
    model, idx = random_model(GPTConfig(**FULL_STACK)), tokens(2, 12)
    with torch.inference_mode(made_within):
        cache = model.new_cache(2, 20, **pages)
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
