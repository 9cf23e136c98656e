"""The engine: a request's result depends only on the request, however rows, pages and chunks are
shared (in float64)."""
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from engine.engine import Engine
from engine.pages.page_table import page_nbytes, rows_nbytes
from engine.requests.params import SamplingParams
from model import GPT
from tests.helpers.serving import (
    ALPHABET, KINDS, TOKENIZER, alone, assert_as_full_forwards_say, assert_idle, assert_same,
    budget_for, engines, model_of, needed, prompt, requests)


# -- results ---------------------------------------------------------------------------------------

@pytest.mark.parametrize('kind', KINDS)
@settings(max_examples=6)
@given(data=st.data())
def test_every_request_gets_the_tokens_of_full_forwards(kind, data):
    wanted = data.draw(requests())
    engine = data.draw(engines(model_of(kind), wanted))
    completions = engine.generate([ids for ids, _ in wanted], [p for _, p in wanted])
    assert [c.prompt_tokens for c in completions] == [ids for ids, _ in wanted]
    for completion, (_, params) in zip(completions, wanted):
        assert_as_full_forwards_say(model_of(kind), completion, params)
    assert_idle(engine)


PARAMS = [SamplingParams(20, temperature=0), SamplingParams(30, seed=1, logprobs=3),
          SamplingParams(25, temperature=2.0, repetition_penalty=1.7, seed=2),
          SamplingParams(28, top_p=0.9, top_k=9, seed=3),
          SamplingParams(22, temperature=0, repetition_penalty=1.3, logprobs=0),
          SamplingParams(1, seed=4)]
MIXED = [(prompt(n, seed=n), params) for n, params in zip((9, 3, 14, 1, 6, 30), PARAMS)]


@pytest.mark.parametrize('kind, kv_dtype', [
    *((kind, 'int8') for kind in ('full stack', 'vanilla', 'unshared', 'latents')),
    ('vanilla', 'float64'), ('key offset', 'int4')])
def test_preemption_changes_no_text(kind, kv_dtype):
    """Requests with penalties and seeds are preempted repeatedly."""
    model = model_of(kind)
    budget = budget_for(model, 4, needed(MIXED), 20, 2, kv_dtype)
    engine = Engine(model, 4, needed(MIXED), kv_dtype, page_size=2, prefill_chunk=7,
                    kv_budget=budget)
    for ids, params in MIXED:
        engine.submit(ids, params)
    asked, completions = list(engine.requests.values()), {}
    while engine.n_unfinished:
        completions |= {e.index: e.completion for e in engine.step() if e.completion}
    assert sum(request.preempted for request in asked) >= 3
    assert any(r.preempted and r.params.repetition_penalty > 1 for r in asked)
    for number, (ids, params) in enumerate(MIXED):
        assert_same(completions[number], alone(model, ids, params, kv_dtype=kv_dtype))
    assert_idle(engine)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('asynchronous', [False, True])
@settings(max_examples=10)
@given(data=st.data())
def test_requests_come_and_are_cancelled_and_steps_fail_at_any_time(kind, asynchronous, data):
    model, wanted = model_of(kind), data.draw(requests(most=7))
    engine = data.draw(engines(model, wanted, asynchronous=asynchronous))
    events, todo, cancelled = {}, list(enumerate(wanted)), set()
    plain, fails = engine.scheduler.computed, []

    def computed(*args):
        plain(*args)
        if fails and fails.pop() == 'here':
            raise KeyboardInterrupt
    engine.scheduler.computed = computed
    while todo or engine.n_unfinished:
        what = data.draw(st.sampled_from(['submit', *['step'] * 5, 'fail', 'cancel']))
        if what == 'submit' and todo:
            number, (ids, params) = todo.pop(0)
            assert engine.submit(ids, params) == number
            events[number] = []
        elif what == 'cancel' and engine.requests:
            number = data.draw(st.sampled_from(sorted(engine.requests)))
            event = engine.cancel(number)
            assert engine.cancel(number) is None
            # None: it has just ended, by a token that was in flight
            assert event or engine.asynchronous
            if event:
                assert event.completion.finish_reason == 'cancelled'
                cancelled.add(number)
        else:
            fails[:] = ['here', *['not yet'] * data.draw(st.integers(0, 2))] * (what == 'fail')
            try:
                for event in engine.step():
                    events[event.index].append(event)
            except KeyboardInterrupt:
                assert engine._flight is None
            fails.clear()
    for number, (ids, params) in enumerate(wanted):
        *_, last = events[number]
        got, expected = last.completion, alone(model, ids, params)
        assert [e.token for e in events[number] if e.token >= 0] == got.tokens
        logprobs = [e.logprob for e in events[number] if e.token >= 0 and e.logprob]
        assert logprobs == (got.logprobs or [])
        if number in cancelled:
            assert (got.finish_reason, last.token) == ('cancelled', -1)
            assert got.tokens == expected.tokens[:len(got.tokens)]
        else:
            assert_same(got, expected)
    assert_idle(engine)


# -- events and texts ------------------------------------------------------------------------------

@pytest.mark.parametrize('budget', [0, 16])
def test_streamed_text_ends_before_the_stop_text(budget):
    """Even if stop texts straddle tokens, end with the last one or are incomplete there, or are the
    text of a stop token; and after preemption."""
    model, texts = model_of('full stack'), ['ab', 'cde', 'wvutsrq', 'a', 'bc', 'abc']
    whole = [alone(model, text, SamplingParams(40, temperature=1.5, seed=k),
                   tokenizer=TOKENIZER).text for k, text in enumerate(texts)]
    stops = [(whole[0][9:12],), (whole[1][20:22], 'zz'), (whole[2][-2:] + 'z',),
             (whole[3][:1] + 'z', whole[3][30:34]), (whole[4][-3:],), (whole[5][20],)]
    params = [SamplingParams(40, temperature=1.5, seed=k, stop=s) for k, s in enumerate(stops)]
    params[5] = dataclasses.replace(params[5], stop=(), stop_tokens=(
        ALPHABET.index(whole[5][20]),))
    engine = Engine(model, 3, 60, page_size=4, prefill_chunk=4, tokenizer=TOKENIZER,
                    kv_budget=budget and budget_for(model, 3, 60, budget, 4))
    pieces, completions = [''] * 6, [None] * 6
    for event in engine.stream(texts, params):
        assert completions[event.index] is None
        pieces[event.index] += event.text
        completions[event.index] = event.completion
    for completion, piece, text, stop in zip(completions, pieces, whole, stops):
        cut = min([text.find(s) for s in stop if s in text], default=len(text))
        assert piece == completion.text == text[:cut]
        assert completion.finish_reason == ('stop' if cut < 40 else 'length')
        assert TOKENIZER.decode(completion.tokens).startswith(completion.text)
    assert_idle(engine)


def test_on_event_sees_every_token_and_without_a_tokenizer_no_text():
    engine, seen = Engine(model_of('unshared'), 2, needed(MIXED)), []
    prompts = [torch.tensor(ids) for ids, _ in MIXED]
    completions = engine.generate(prompts, [p for _, p in MIXED], seen.append)
    for n, completion in enumerate(completions):
        assert [e.token for e in seen if e.index == n] == completion.tokens
        assert completion.text == '' and 0 <= completion.ttft_s <= completion.seconds
    assert sorted(e.index for e in seen if e.completion) == list(range(len(MIXED)))
    assert not any(e.text for e in seen)
    assert engine.generate([]) == []


# -- streams ---------------------------------------------------------------------------------------

def test_a_stream_left_early_cancels_what_has_not_ended():
    model = model_of('full stack')
    engine = Engine(model, 2, 40, page_size=4)
    for event in engine.stream([prompt(5), prompt(6), prompt(7)], SamplingParams(20)):
        if event.completion is None and len(engine.requests[0].tokens) > 3:
            break
    assert_idle(engine)
    stream = engine.stream([prompt(5)], SamplingParams(3))
    stream.close()  # before the first event
    assert_idle(engine)
    with pytest.raises(ZeroDivisionError) as caught:
        engine.generate([prompt(5), prompt(6), prompt(7)], SamplingParams(20), lambda event: 1 / 0)
    # the traceback keeps the frame, and so would have kept the stream
    assert caught.value.__traceback__ is not None
    assert_idle(engine)
    assert_same(engine.generate([prompt(5)], SamplingParams(9, seed=2))[0],
                alone(model, prompt(5), SamplingParams(9, seed=2)))


def test_a_request_cancelled_within_its_stream_ends_there():
    """The stream used to wait forever for its end."""
    model, ended = model_of('full stack'), {}
    engine = Engine(model, 2, 40)
    for event in engine.stream([prompt(5), prompt(6), prompt(7)], SamplingParams(15, seed=1)):
        if event.index == 0:
            for number in (1, 2):  # a running request, then a waiting one
                engine.cancel(number)
        if event.completion:
            ended[event.index] = event.completion
    assert [ended[n].finish_reason for n in range(3)] == ['length', 'cancelled', 'cancelled']
    assert ended[2].tokens == [] and ended[2].ttft_s is None
    assert_same(ended[0], alone(model, prompt(5), SamplingParams(15, seed=1)))
    assert_idle(engine)


def test_two_streams_and_requests_beside_them_do_not_take_each_others_events():
    """Each stream used to drop the other's events, and neither ended. The events of a request
    beside them are those of the next step."""
    model, params = model_of('unshared'), SamplingParams(12, seed=3)
    engine = Engine(model, 3, 40, prefill_chunk=4)
    single = engine.submit(prompt(9, seed=9), params)
    streams = [engine.stream([prompt(5, seed=k), prompt(11, seed=k)], params) for k in range(2)]
    tokens = [[[], []], [[], []]]
    for events in zip(*streams):
        for k, event in enumerate(events):
            tokens[k][event.index].append(event.token)
    for k in range(2):
        for event in streams[k]:
            tokens[k][event.index].append(event.token)
        for n, length in enumerate((5, 11)):
            assert tokens[k][n] == alone(model, prompt(length, seed=k), params).tokens
    events = engine.step()
    assert {event.index for event in events} == {single}
    assert events[-1].completion.tokens == alone(model, prompt(9, seed=9), params).tokens
    assert_idle(engine)


# -- how it is computed ----------------------------------------------------------------------------

def test_requests_are_computed_together_and_a_long_prompt_does_not_stall_others(recorded):
    """Checks (shape, lens) of each forward pass; a free row is reused at once."""
    model = model_of('full stack')
    passes = recorded(GPT, 'forward', lambda self, idx, **kw: (tuple(idx.shape), list(kw['lens'])))
    Engine(model, 3, 40).generate([prompt(5), prompt(2), prompt(7)], SamplingParams(6))
    assert passes == [((3, 7), [5, 2, 7])] + [((3, 1), [1, 1, 1])] * 5
    passes.clear()
    Engine(model, 2, 60, prefill_chunk=8).generate(
        [prompt(3), prompt(3), prompt(18)], [SamplingParams(n) for n in (7, 2, 2)])
    assert passes == [((2, 3), [3, 3]), ((2, 1), [1, 1]), ((1, 8), [8]), ((1, 1), [1]),
                      ((1, 8), [8]), ((1, 1), [1]),
                      ((1, 2), [2]), ((1, 1), [1]), ((2, 1), [1, 1]), ((1, 1), [1])]


@pytest.mark.parametrize('kind', ['full stack', 'vanilla', 'K = V', 'key offset'])
def test_the_budget_is_used_and_not_exceeded(kind):
    """Too small a budget is refused with the least that would do: one page."""
    model = model_of(kind)
    full = Engine(model, 3, 50, page_size=8).cache.nbytes
    rings, page = rows_nbytes(model.plan, 3, 50, 'float64'), page_nbytes(model.plan, 8, 'float64')
    for budget in (rings + page, (full + rings) // 2, full, 10 * full):
        nbytes = Engine(model, 3, 50, page_size=8, kv_budget=budget).cache.nbytes
        assert budget - page < nbytes <= budget or nbytes == full < budget
    with pytest.raises(UserError, match=f'give at least {rings + page:,}'):
        Engine(model, 3, 50, page_size=8, kv_budget=rings + page - 1)
