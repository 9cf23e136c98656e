"""What happens inside one step of a cache: failures midway, decoded copies, misuse."""
import pytest

from config.errors import UserError
from config.gpt_config import GPTConfig
from kv.cache import KVCache
from tests.helpers.models import FULL_STACK, feed, full_logits, max_gap, random_model, tokens


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


def test_decoded_copies_live_only_until_their_last_reader(monkeypatch):
    """An int8 cache is expanded a slot at a time: what the first period read is gone when the second is under way."""
    config = GPTConfig(**FULL_STACK | dict(n_layer=12))
    model, alive = random_model(config), []
    cache = model.new_cache(1, 16, 'int8')
    plain = KVCache.append

    def append(self, *args):
        alive.append(sorted(self._views))
        return plain(self, *args)
    monkeypatch.setattr(KVCache, 'append', append)
    feed(model, cache, tokens(1, 7), [7])
    # slots: 0 (layers 0 1), 1 (2 3 4), 2 (5 11, global), 3 (6 7), 4 (8 9 10)
    assert alive == [[], [], [], [2], [2]]


def test_lens_without_a_cache_is_refused():
    model = random_model(GPTConfig(**FULL_STACK))
    with pytest.raises(UserError, match='lens'):
        model(tokens(2, 4), lens=[4, 2])
