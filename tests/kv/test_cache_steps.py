"""What happens inside one step of a cache: failures midway, decoded copies, misuse."""
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention.cached import tiles
from config.errors import UserError
from config.gpt_config import GPTConfig
from tests.helpers.models import FULL_STACK, feed, full_logits, max_gap, random_model, tokens
from training.run import prepare


def test_a_step_that_failed_midway_is_not_built_upon(monkeypatch):
    model, idx = random_model(GPTConfig(**FULL_STACK)), tokens(1, 20)
    cache = model.new_cache(1, 40)
    feed(model, cache, idx[:, :9], [9])
    block = model.transformer.h[4]
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(block, 'forward', lambda *_: (_ for _ in ()).throw(MemoryError()))
        feed(model, cache, idx[:, 9:17], [8])
    with pytest.raises(UserError, match='reset'):
        feed(model, cache, idx[:, 9:13], [4])
    cache.reset()
    assert max_gap(feed(model, cache, idx, [9, 11]), full_logits(model, idx)) < 1e-9


class LargestFloat(TorchDispatchMode):
    """Elements of the largest floating-point tensor that any operation gave."""
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
    """No operation gives a decoded copy of a slot: floats are small beside what the global slot holds."""
    monkeypatch.setattr(tiles, '__defaults__', (256,))
    model = random_model(GPTConfig(**FULL_STACK | dict(block_size=1024)))
    prepare(model, 1000)  # rotary tables are no part of the step
    cache = model.new_cache(4, 1000, 'int8').fill_(990)
    if ragged:
        cache.reset([1])
        model(tokens(4, 9), cache=cache, lens=[0, 9, 0, 0])
    with LargestFloat() as floats, torch.no_grad():
        model(tokens(4, t), cache=cache)
    held = 4 * 990 * model.plan.head_dim  # elements of K in the global slot
    assert 256 <= floats.largest <= held / 5


def test_lens_without_a_cache_is_refused():
    model = random_model(GPTConfig(**FULL_STACK))
    with pytest.raises(UserError, match='lens'):
        model(tokens(2, 4), lens=[4, 2])
