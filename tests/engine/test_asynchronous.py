"""The asynchronous engine schedules a step before it reads the tokens of the last one, and every
request gets what it gets from the synchronous one."""
import copy

import pytest
import torch

from common.gpt_config import GPTConfig
from engine.engine import Engine
from engine.requests.flight import Flight
from engine.requests.params import SamplingParams
from tests.helpers.models import FULL_STACK, random_model
from tests.helpers.serving import TOKENIZER, alone, assert_idle, assert_same, model_of, prompt


@pytest.fixture
def log(recorded):
    """What happens, in order: 'compute' for each decode step, 'read' for tokens that are read."""
    entries = []
    recorded(Flight, 'read', lambda flight: entries.append('read'))
    recorded(Engine, '_decode', lambda *args: entries.append('compute'))
    return entries


def run(asynchronous, params):
    """The events of each step."""
    engine = Engine(model_of('full stack'), 2, 40, asynchronous=asynchronous, tokenizer=TOKENIZER)
    for k in range(2):
        engine.submit(prompt(3, seed=k), params)
    steps = []
    while engine.n_unfinished:
        steps.append(engine.step())
    assert_idle(engine)
    return steps


@pytest.mark.parametrize('params, ahead', [
    (dict(temperature=0), True), (dict(temperature=1.0, seed=1, logprobs=2), True),
    (dict(seed=2, top_p=0.8, top_k=9, stop=('a', 'bc')), True),
    # the penalty of the next token depends on this one
    (dict(repetition_penalty=1.5), False)], ids=str)
def test_a_step_is_computed_before_the_tokens_of_the_last_one_are_read(log, params, ahead):
    """Events are those of the synchronous engine, one step later."""
    params = SamplingParams(4, **params)
    a = run(False, params)
    assert log == ['read', 'compute', 'read', 'compute', 'read', 'compute', 'read']
    log.clear()
    b = run(True, params)
    assert log == (['compute', 'read'] * 3 if ahead else ['read', 'compute'] * 3) + ['read']
    assert b[0] == []
    for before, after in zip(a, b[1:], strict=True):
        assert [(e.index, e.token, e.text) for e in before] == [
            (e.index, e.token, e.text) for e in after]
        for x, y in zip(before, after):
            assert (x.completion is None) == (y.completion is None)
            assert x.completion is None or assert_same(x.completion, y.completion) is None


def spoilt(asynchronous):
    """An engine with a prefix cache, and a list: while it is not empty, each forward pass takes its
    last entry, and gives logits that are not finite if that is true."""
    model, spoil = copy.deepcopy(model_of('full stack')), []
    model.register_forward_hook(lambda model, args, out: (
        out[0] * torch.nan if spoil and spoil.pop() else out[0], out[1]))
    return Engine(model, 1, 60, page_size=4, prefix_budget=10 ** 9,
                  asynchronous=asynchronous), spoil


@pytest.mark.parametrize('asynchronous', [False, True])
def test_what_was_not_finite_is_forgotten_if_it_is_cancelled(asynchronous):
    engine, spoil = spoilt(asynchronous)
    ids = prompt(14)
    engine.generate([ids[:12]], SamplingParams(1, seed=0))  # its blocks are forgotten, too
    number = engine.submit(ids, SamplingParams(9, temperature=0))
    while not engine.step():  # until its first token
        pass
    spoil.append(True)
    events = engine.step()
    assert not spoil and engine.cancel(number) is None  # it has ended
    *_, last = events + engine.step()
    assert last.completion.finish_reason == 'error'
    assert engine.prefix.match(ids + [1, 2, 3]).length == 0


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
    monkeypatch.setattr('engine.steps.captured.suits_capture', lambda model: True)
    assert Engine(model, 1).asynchronous and not Engine(model, 1, asynchronous=False).asynchronous


@pytest.mark.parametrize('kv_dtype', ['float32', 'int8'])
def test_decode_steps_wait_for_the_device_once(everywhere, log, waits, kv_dtype):
    """For the tokens of the step before, also when requests end and rows move."""
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
