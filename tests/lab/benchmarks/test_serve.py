"""bench.py --mode=serve: random lengths, the same requests on both sides, and errors."""
import math
from types import SimpleNamespace

import pytest
import torch

from config.errors import UserError
from config.gpt_config import GPTConfig
from engine.pages.cache import PagedKVCache
from engine.requests.params import SamplingParams
from engine.requests.scheduler import Request
from lab.benchmarks import serve
from tests.helpers.models import FULL_STACK, random_model

SETTINGS = SimpleNamespace(kv_dtype='auto', prefill_chunk=0, repeats=5, captured=True)


def test_lengths_are_log_uniform_and_the_seeds():
    lengths, again, other = (serve.log_uniform(16, 256, 4000, seed=seed) for seed in (1, 1, 2))
    assert lengths == again != other and (min(lengths), max(lengths)) == (16, 256)
    assert sum(map(math.log, lengths)) / 4000 == pytest.approx(math.log(16 * 256) / 2, abs=0.05)
    assert serve.output_range('16,256') == (16, 256) and serve.output_range('5') == (5, 5)


@pytest.mark.parametrize('text', ['9,3', '1,2,3', '0,4', 'a', ''])
def test_what_is_no_range(text):
    with pytest.raises(UserError, match='output_lengths'):
        serve.output_range(text)


def test_the_static_engine_admits_only_when_all_have_left():
    model = random_model(GPTConfig(**FULL_STACK))
    cache = model.new_cache(2, 32, cache_class=PagedKVCache, n_pages=32, page_size=4)
    scheduler = serve.StaticScheduler(cache, 8)
    for n in range(3):
        scheduler.waiting.append(Request(n, [1, 2], SamplingParams()))
    scheduler.schedule()
    assert [r.number for r in scheduler.running] == [0, 1]
    scheduler.finish(scheduler.running[0])
    scheduler.schedule()
    assert [r.number for r in scheduler.running] == [1]
    scheduler.finish(scheduler.running[0])
    scheduler.schedule()
    assert [r.number for r in scheduler.running] == [2]


@pytest.mark.parametrize('n_requests, rows', [(7, 3), (2, 4), (4, 1)])
def test_all_sides_give_each_request_its_tokens(n_requests, rows):
    model = random_model(GPTConfig(**FULL_STACK))
    lengths = [3, 9, 1, 14, 5, 2, 8][:n_requests]
    prompts = [[n, n + 1, 3] for n in range(n_requests)]
    asked = model, prompts, lengths, rows, SETTINGS
    sides = [serve.EngineRound(*asked), serve.StaticRound(*asked),
             serve.EngineRound(*asked, serve.StaticScheduler)]
    for _ in range(2):  # state kept between rounds does no harm
        served = [side() for side in sides]
        assert served[0].tokens == served[1].tokens == served[2].tokens
        assert list(map(len, served[0].tokens)) == lengths
    for one, side in zip(served, sides):
        assert len(one.firsts) == n_requests
        assert all(0 < first <= one.seconds for first in one.firsts)
        assert 0 < one.kv_held <= side.kv_bytes


def test_ratios_are_of_whole_rounds_and_texts_are_compared(monkeypatch):
    """With a clock that shows 2 s per round for our engine, 3 s and 5 s for the others."""
    seconds = {'EngineRound': 2.0, 'StaticRound': 3.0, 'static engine': 5.0}

    def fake(kind):
        def __init__(self, model, prompts, lengths, rows, s, scheduler=None):
            self.name = 'static engine' if scheduler else kind
            self.kv_bytes, self.lengths = 100, lengths

        def __call__(self):
            return serve.Served(seconds[self.name], [1.0, 1.5], [[1] * n for n in self.lengths], 60)
        return type(kind, (), {'__init__': __init__, '__call__': __call__})
    for kind in ('EngineRound', 'StaticRound'):
        monkeypatch.setattr(serve, kind, fake(kind))
    compared = []
    monkeypatch.setattr(serve, 'same_texts', lambda *args: compared.append(args[-1]) or {})
    monkeypatch.setattr(serve.setting, 'random_tokens',
                        lambda model, n, t: torch.zeros(n, t, dtype=torch.int64))
    cell = serve.measure(None, [4, 6], 2, 3, SETTINGS)
    ratios = cell['ratios']['tokens_per_second']
    medians = {name: ratio['median'] for name, ratio in ratios.items()}
    assert medians == {'static': 1.5, 'static engine': 2.5}
    ours = cell['sides']['ours']
    assert ours['tokens_per_second']['median'] == 5.0
    assert ours['ttft_ms']['median'] == 1250 and ours['kv_held_bytes'] == 60
    assert compared == ['static', 'static engine']


def test_other_texts_are_not_passed_over():
    model = random_model(GPTConfig(**FULL_STACK), torch.float32)
    tokens = serve.EngineRound(model, [[1, 2]], [4], 1, SETTINGS)().tokens
    found = serve.same_texts(model, [[1, 2]], tokens, tokens, 'static')
    assert found == {'rows_equal': 1, 'rows': 1}
    with pytest.raises(UserError, match='more than rounding'):
        serve.same_texts(model, [[1, 2]], tokens, [[(t + 1) % 23 for t in tokens[0]]], 'static')
