"""Logits after a hit are those of a full forward, in float32 to 1e-5, whatever conversations came
before."""
import copy
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.params import SamplingParams
from tests.helpers.models import full_logits, max_gap
from tests.helpers.serving import KINDS, budget_for, model_of, prompt

SIZE, LONGEST = 4, 60  # windows are 5 to 7: a text of 60 wraps every ring many times


@functools.cache
def float_model(kind):
    return copy.deepcopy(model_of(kind)).float()


class Recorded(Engine):
    """An engine that keeps the logits of each token it draws: drawn[number of the request] is a
    list of (V,)."""

    drawn: dict

    def _sample(self, parts, logits, events):
        before = [len(request.tokens) if n else 0 for request, n in parts]
        super()._sample(parts, logits, events)
        for (request, n), n_before, row in zip(parts, before, logits):
            if n and len(request.tokens) > n_before:
                self.drawn.setdefault(request.number, []).append(row.clone())


def engine_of(kind, budget, n_pages, prefill_chunk):
    model = float_model(kind)
    engine = Recorded(model, 2, LONGEST, 'float32', page_size=SIZE, prefill_chunk=prefill_chunk,
                      prefix_budget=budget,
                      kv_budget=budget_for(model, 2, LONGEST, n_pages, SIZE, 'float32'))
    engine.drawn = {}
    return engine


def next_prompt(kind, said, pick, n):
    """How a conversation may go on. said: what was said in each one so far, prompts and replies."""
    old, new = said[pick % len(said)], prompt(n, seed=pick)
    return {'append few': old + new[:3], 'append many': old + new * 3, 'edit': old[:-(1 + pick % 9)]
            + new,
            'fork': old[:1 + pick % len(old)] + new, 'repeat': old,
            'below a block': new[:1 + pick % (SIZE - 1)],
            'evict': prompt(LONGEST, seed=pick)}[kind][:LONGEST - 8] or new


TURN = st.tuples(st.sampled_from(['append few', 'append many', 'edit', 'fork', 'repeat',
                                  'below a block', 'evict']),
                 st.integers(0, 10 ** 6), st.integers(1, 12), st.integers(1, 8))


@pytest.mark.parametrize('kind', KINDS)
@settings(max_examples=12)
@given(turns=st.lists(TURN, min_size=2, max_size=8), budget=st.sampled_from([10 ** 9, 6_000]),
       n_pages=st.sampled_from([15, 40]), prefill_chunk=st.sampled_from([5, 256]))
def test_logits_are_those_of_a_full_forward(kind, turns, budget, n_pages, prefill_chunk):
    engine, said, found = engine_of(kind, budget, n_pages, prefill_chunk), [prompt(9)], 0
    for number, (how, pick, n, new) in enumerate(turns):
        ids = next_prompt(how, said, pick, n)
        [completion] = engine.generate([ids], SamplingParams(new, seed=pick))
        whole = full_logits(engine.model, torch.tensor([ids + completion.tokens[:-1]]))[0,
                                                            len(ids) - 1:]
        assert max_gap(torch.stack(engine.drawn.pop(number)), whole) < 1e-5, f'turn {number}: {how}'
        said.append(ids + completion.tokens)
        found += completion.n_cached
    assert found == engine.prefix.stats.found


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('how', ['append few', 'append many', 'edit', 'fork', 'repeat'])
def test_each_way_to_go_on_takes_something_over(kind, how):
    """Or the test above would be of nothing."""
    engine, ids = engine_of(kind, 10 ** 9, 40, 256), prompt(30)
    engine.generate([ids], SamplingParams(8, seed=0))
    [completion] = engine.generate([next_prompt(how, [ids], 28, 6)], SamplingParams(2, seed=0))
    assert completion.n_cached >= SIZE
