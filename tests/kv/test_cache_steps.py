"""Within a step of a cache: failures halfway, decoded copies, misuse."""
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention.cached import tiles
from config.errors import UserError
from config.gpt_config import GPTConfig
from kv.cache import KVCache
from tests.helpers.models import FULL_STACK, feed, full_logits, max_gap, random_model, tokens
from training.run import prepare


class LargestFloat(TorchDispatchMode):
    """`largest`: elements of the largest floating-point tensor returned by an operation."""
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.largest = max(self.largest, x.numel())
        return out


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
    with LargestFloat() as floats, torch.no_grad():
        model(tokens(4, t), cache=cache)
    held = 4 * 990 * model.plan.head_dim  # elements of K in the global slot
    assert 256 <= floats.largest <= held / 5


def test_rows_may_be_reset_one_by_one_after_a_failure(monkeypatch):
    model, idx = random_model(GPTConfig(**FULL_STACK)), tokens(3, 20)
    cache = model.new_cache(3, 40)
    feed(model, cache, idx[:, :9], [9])
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(model.transformer.h[4], 'forward',
                      lambda *_: (_ for _ in ()).throw(MemoryError()))
        model(idx[1:, :2], cache=cache, rows=[1, 2])
    cache.reset([1])
    with pytest.raises(UserError, match='reset'):
        model(idx[:1, 9:10], cache=cache, rows=[0])
    cache.reset([2])
    logits = model(idx[:1, 9:10], cache=cache, rows=[0])[0]  # row 0 was not part of that step
    assert max_gap(logits, full_logits(model, idx[:1, :10])[:, -1:]) < 1e-9
    assert cache.lengths.tolist() == [10, 0, 0]


def test_tokens_do_not_count_if_the_logits_fail(monkeypatch):
    model, idx = random_model(GPTConfig(**FULL_STACK)), tokens(1, 9)
    cache = model.new_cache(1, 40)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(model.lm_head, 'forward', lambda *_: (_ for _ in ()).throw(MemoryError()))
        model(idx, cache=cache)
    assert cache.lengths.tolist() == [0]


def test_ragged_tokens_past_the_learned_positions_are_refused():
    vanilla = dict(n_layer=2, n_head=2, n_embd=12, block_size=8, vocab_size=20)
    model = random_model(GPTConfig(**vanilla))
    cache = KVCache(model.plan, 2, 20, 'float64', torch.float64)
    model(torch.zeros(2, 6, dtype=torch.long), cache=cache, lens=[6, 3])
    model(torch.zeros(2, 5, dtype=torch.long), cache=cache, lens=[2, 5])  # up to 8, padding beyond
    with pytest.raises(UserError, match='sequence of 9 tokens'):
        model(torch.zeros(2, 1, dtype=torch.long), cache=cache, lens=[0, 1])
    assert cache.lengths.tolist() == [8, 8]


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
