"""The asynchronous engine schedules a step before it reads the tokens of the last one, and every
request gets what it gets from the synchronous one."""
import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config.gpt_config import GPTConfig
from engine.engine import Engine
from engine.flight import Flight
from engine.params import SamplingParams
from engine.sampler import Drawn
from tests.helpers.models import FULL_STACK, random_model
from tests.helpers.serving import (
    KINDS,
    TOKENIZER,
    alone,
    assert_idle,
    assert_same,
    budget_for,
    engines,
    model_of,
    prompt,
    requests,
)


@pytest.fixture
def log(monkeypatch):
    """What happens, in order: 'compute' for each decode step, 'read' for tokens that are read."""
    entries, read, steps = [], Flight.read, Engine._decode

    def decode(*args):
        entries.append('compute')
        return steps(*args)

    def logged(flight):
        entries.append('read')
        return read(flight)
    monkeypatch.setattr(Flight, 'read', logged)
    monkeypatch.setattr(Engine, '_decode', decode)
    return entries


def run(asynchronous, params, **more):
    engine = Engine(model_of('full stack'), 2, 40, asynchronous=asynchronous, tokenizer=TOKENIZER)
    for k in range(2):
        engine.submit(prompt(3, seed=k), params)
    steps = []
    while engine.n_unfinished:
        steps.append(engine.step())
    assert_idle(engine)
    return steps


@pytest.mark.parametrize('params, expected', [
    (dict(temperature=0), ['compute', 'read'] * 3 + ['read']),
    (dict(temperature=1.0, seed=1), ['compute', 'read'] * 3 + ['read']),
    (dict(top_k=3, logprobs=1), ['compute', 'read'] * 3 + ['read']),
    # the penalty of the next token depends on this one
    (dict(repetition_penalty=1.5), ['read', 'compute'] * 3 + ['read'])], ids=str)
def test_a_step_is_computed_before_the_tokens_of_the_last_one_are_read(log, params, expected):
    run(True, SamplingParams(4, **params))
    assert log == expected
    log.clear()
    run(False, SamplingParams(4, **params))
    assert log == ['read', 'compute', 'read', 'compute', 'read', 'compute', 'read']


@pytest.mark.parametrize('params', [
    dict(temperature=0), dict(seed=1, logprobs=2), dict(seed=2, top_p=0.8, stop=('a', 'bc'))])
def test_events_are_the_same_one_step_later(params):
    params = SamplingParams(12, **params)
    a, b = run(False, params), run(True, params)
    assert b[0] == [] and len(b) == len(a) + 1
    for before, after in zip(a, b[1:]):
        assert [(e.index, e.token, e.text) for e in before] == [
            (e.index, e.token, e.text) for e in after]
        for x, y in zip(before, after):
            assert (x.completion is None) == (y.completion is None)
            assert x.completion is None or assert_same(x.completion, y.completion) is None


def test_a_request_that_ends_by_its_length_is_not_computed_once_more(log):
    engine = Engine(model_of('full stack'), 2, 40, asynchronous=True)
    for n in (2, 6):
        engine.submit(prompt(3), SamplingParams(n, seed=0))
    computed = []
    plain = engine.scheduler.computed
    engine.scheduler.computed = lambda request, n: (computed.append(request.number),
                                                    plain(request, n))
    while engine.n_unfinished:
        engine.step()
    # its prompt and all of its tokens but the last
    assert [computed.count(number) for number in (0, 1)] == [2, 6]


@pytest.mark.parametrize('kind', KINDS)
@settings(max_examples=12)
@given(data=st.data())
def test_requests_come_and_end_and_steps_fail_at_any_time(kind, data):
    """Few pages, so that requests are preempted while their tokens are in flight."""
    model, wanted = model_of(kind), data.draw(requests(most=6))
    engine = data.draw(engines(model, wanted, asynchronous=True))
    todo, events, cancelled = list(enumerate(wanted)), {}, set()
    plain, fails = engine.scheduler.computed, []

    def computed(*args):
        plain(*args)
        if fails and fails.pop() == 'here':
            raise KeyboardInterrupt
    engine.scheduler.computed = computed
    while todo or engine.n_unfinished:
        what = data.draw(st.sampled_from(['submit', *['step'] * 6, 'fail', 'cancel']))
        if what == 'submit' and todo:
            number, (ids, params) = todo.pop(0)
            assert engine.submit(ids, params) == number
            events[number] = []
        elif what == 'cancel' and engine.jobs:
            number = data.draw(st.sampled_from(sorted(engine.jobs)))
            assert engine.cancel(number).completion.finish_reason == 'cancelled'
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
        if number in cancelled:
            assert got.tokens == expected.tokens[:len(got.tokens)]
        else:
            assert_same(got, expected)
    assert_idle(engine)


@pytest.mark.parametrize('kind', ['full stack', 'unshared', 'vanilla', 'offset keys'])
def test_preempted_while_a_token_is_in_flight(kind):
    model = model_of(kind)
    wanted = [(prompt(n, seed=n), SamplingParams(20, seed=n)) for n in (9, 3, 14, 6)]
    engine = Engine(model, 4, 34, page_size=2, prefill_chunk=7, asynchronous=True,
                    kv_budget=budget_for(model, 4, 34, 20, 2))
    in_flight, plain = [], engine.scheduler.preempt
    engine.scheduler.preempt = lambda request: (in_flight.append(request.in_flight), plain(request))
    done = engine.generate([ids for ids, _ in wanted], [p for _, p in wanted])
    assert 1 in in_flight or kind == 'vanilla'
    for completion, (ids, params) in zip(done, wanted):
        assert_same(completion, alone(model, ids, params))
    assert_idle(engine)


@pytest.mark.parametrize('kind', [*KINDS, 'offset keys', 'tied'])
@pytest.mark.parametrize('pages', [0, 24])
def test_conversations_with_a_prefix_cache(kind, pages):
    """Stop tokens end replies, so that a row computes one token more than its reply has."""
    model, draw, said = model_of(kind), random.Random(kind), [prompt(5, seed=1)]
    engines = [Engine(model, 3, 60, page_size=4, prefill_chunk=12, prefix_budget=10 ** 9,
                      kv_budget=pages and budget_for(model, 3, 60, pages, 4),
                      asynchronous=asynchronous) for asynchronous in (False, True)]
    found = 0
    for turn in range(8):
        old = draw.choice(said)[:48]
        prompts = [(old + prompt(k + 1, seed=turn))[:50] for k in range(3)]
        params = [SamplingParams(draw.randint(1, 9), seed=turn, stop_tokens=(3, 8, 11, 13))] * 3
        synchronous, asynchronous = (engine.generate(prompts, params) for engine in engines)
        for a, b, ids in zip(synchronous, asynchronous, prompts):
            assert_same(a, alone(model, ids, params[0]))
            assert_same(a, b)
            found += b.n_cached - a.n_cached
            said.append(ids + a.tokens)
    table, store = engines[1].cache.table, engines[1].prefix
    assert found >= 0 and not any(table.rows) and not any(block.users for block in store.blocks)
    assert table.n_free + table.n_evictable == table.n_pages


def test_a_reply_that_a_stop_token_ends_is_found_whole():
    """Its last token was computed, too, which the synchronous engine does not do."""
    model, ids = model_of('full stack'), prompt(9)
    tokens = alone(model, ids, SamplingParams(12, seed=1)).tokens
    n = next(n for n in range(4, 12) if tokens[n] not in tokens[:n])
    params = SamplingParams(12, seed=1, stop_tokens=(tokens[n],))
    for asynchronous in (False, True):
        engine = Engine(model, 1, 60, page_size=4, prefix_budget=10 ** 9, asynchronous=asynchronous)
        [done] = engine.generate([ids], params)
        assert (done.tokens, done.finish_reason) == (tokens[:n + 1], 'stop')
        engine.step()
        assert engine.prefix.match(ids + done.tokens + [1]).length == 9 + n + asynchronous


def test_who_is_asynchronous(monkeypatch):
    model = random_model(GPTConfig(**FULL_STACK))
    assert not Engine(model, 1).asynchronous and Engine(model, 1, asynchronous=True).asynchronous
    monkeypatch.setattr('engine.captured.suits_capture', lambda model: True)
    assert Engine(model, 1).asynchronous and not Engine(model, 1, asynchronous=False).asynchronous


def test_tokens_in_flight_are_passed_on_by_the_device():
    """Ids that the host does not know are 0 until they are filled in; -1 becomes a valid id."""
    class Job:
        def __init__(self):
            self.request, self.sampling, self.launched = self, self, 0
            self.penalised, self.in_flight = False, 1

        def launch(self):
            self.launched += 1
    jobs = [Job() for _ in range(4)]
    flight = Flight(jobs, Drawn(torch.tensor([5, -1, 7, 8]), [None] * 4))
    assert [job.launched for job in jobs] == [1] * 4
    jobs[3].in_flight = 0  # its token is known, and given
    ids = torch.tensor([[0], [1], [2], [0], [3]])
    flight.fill(ids, [jobs[2], None, jobs[3], jobs[1], jobs[0]])
    assert ids[:, 0].tolist() == [7, 1, 2, 0, 5]
    assert [token for _, token, _ in flight.read()] == [5, -1, 7, 8]


def test_the_times_of_steps_are_those_of_the_device(monkeypatch):
    """Which takes 20 ms for each pass that samples; the host does not wait for it when it starts
    one."""
    read = Flight.read

    def slow(flight):
        time.sleep(0.02)
        return read(flight)
    monkeypatch.setattr(Flight, 'read', slow)
    engine = Engine(model_of('full stack'), 2, 60, asynchronous=True, slowdown=2.0, page_size=4)
    engine.submit(prompt(3), SamplingParams(30, seed=0))
    for _ in range(6):
        engine.step()
    engine.submit(prompt(40), SamplingParams(9, seed=1))
    while engine.n_unfinished:
        engine.step()
    assert len(engine.pace._decode) == engine.pace._decode.maxlen
    assert min(engine.pace._decode) >= 0.02


@pytest.mark.parametrize('kv_dtype', ['float32', 'int8'])
def test_decode_steps_wait_for_the_device_once(monkeypatch, log, waits, kv_dtype):
    """For the tokens of the step before, also when requests end and rows move."""
    monkeypatch.setattr('engine.captured.suits_capture', lambda model: True)
    model = random_model(GPTConfig(**FULL_STACK), torch.float32)
    engine = Engine(model, 4, 60, kv_dtype, page_size=4)
    for k, more in enumerate([{}, dict(top_k=4), dict(top_p=0.8, min_p=0.1), dict(temperature=0)]):
        engine.submit([1, 2, 3], SamplingParams(max_new_tokens=7 + 5 * k, seed=k, **more))
    for _ in range(3):
        engine.step()
    waits.clear(), log.clear()
    n_events = n_steps = 0
    while engine.n_unfinished:
        events = engine.step()
        n_events, n_steps = n_events + len(events), n_steps + 1
    assert n_steps > 15 and n_events > 40 and log.count('read') == n_steps
    # and these of tensors on the host: the lengths of rows, two lists of rows for each that ends
    assert waits == ['tolist'] * (n_steps + log.count('compute') + 2 * 4)
