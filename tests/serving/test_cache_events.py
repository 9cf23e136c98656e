"""The stream of cache events: each states what the engine and its tensors hold at that moment."""
import json
from collections import defaultdict
from itertools import dropwhile
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from engine.pages.view import RowView
from engine.requests.params import SamplingParams
from serving.worker import Choice, Ticket, Worker
from tests.helpers.serving import TOKENIZER, budget_for
from tests.serving.cache_events import Recorder, assert_agree, pages_carried, read
from tests.serving.conftest import (
    CHAT, COMPLETIONS, LONGEST, MODEL, USER, assert_free, assert_refused, eventually, expected,
    in_background)

WATCHED, WATCHED_CHAT, PLAN = '/nanokv/completions', '/nanokv/chat/completions', '/nanokv/plan'
TEXT = 'abcdefghijklmnopqrstuvw' * 2


@pytest.fixture
def unlimited(monkeypatch):
    """A view after each step."""
    monkeypatch.setattr('serving.worker.VIEW_INTERVAL', 0.0)


def watch(server, path=WATCHED, **fields):
    response = server.client.post(path, json=dict(stream=True, seed=1) | fields)
    assert response.status_code == 200, response.text
    return response.text


def test_the_plan_document_is_the_plans_arithmetic(serve):
    server = serve()
    plan, dtype = MODEL.plan, 'float64'
    found = server.client.get(PLAN).json()
    slots = found.pop('slots')
    # one K/V head, since 4 heads have no third; of the global layer only K
    assert found.pop('gemma_slots') == [[5, 2 * 6 * 8]] * 5 + [[0, 6 * 8]] + [[5, 2 * 6 * 8]]
    assert found == dict(
        model='tiny', models=['tiny'], dataset='',
        parameters=sum(p.numel() for p in MODEL.parameters()),
        max_positions=LONGEST, max_seq_len=LONGEST, block_size=64, kv_dtype=dtype,
        page_size=4, pages=server.engine.cache.table.n_pages, rows=3,
        vanilla_position_nbytes=7 * 2 * 4 * 6 * 8,
        vanilla_position_nbytes_bf16=7 * 2 * 4 * 6 * 2)
    assert [(slot['slot'], slot['kind'], slot['window'], slot['owner'], slot['layers'])
            for slot in slots] == [(s.index, s.kind, s.window, s.owner, list(s.layers))
                                   for s in plan.slots]
    assert sum(slot['capacity'] * slot['position_nbytes'] + slot['state_nbytes']
               for slot in slots) == plan.nbytes(1, LONGEST, dtype)
    assert server.logged == []


def test_events_agree_with_the_engine(serve, held, unlimited):
    """Past a ring's wrap, after a prefix hit, and of two rows that share pages."""
    server = serve(rows=2)
    recorder, users = Recorder(server.engine), []
    asked = [in_background(lambda: watch(server, prompt=TEXT[:34], max_tokens=12,
                                         stream_options={'include_usage': True}))
             for _ in range(2)]
    server.wait_for(2)
    held.set()
    text = TEXT[:34] + expected(TEXT[:34], 12, seed=1).text
    # the engine's first request is the one that found nothing in the prefix cache
    streams = sorted((it.result() for it in asked), key=lambda s: '"cached": 0,' not in s)
    for number, stream in enumerate(streams):
        usage = json.loads(read(stream)[1].split('\n\n')[-3].removeprefix('data: '))['usage']
        cached = usage['prompt_tokens_details']['cached_tokens']
        assert (cached > 0) == (number > 0)
        events = assert_agree(recorder, number, stream, text)
        assert events[-1]['cached'] == cached and events[-1]['length'] == len(text) - 1
        users += [users for event in events for _, users in event['pages']]
    assert max(users) == 3  # both rows and the prefix cache
    assert_free(server.worker)


def views_of(server, *asked):
    """The views that the worker delivers for each choice of a watched request."""
    found = []

    def views():
        return [(choice, item) for choice, item in list(found) if isinstance(item, RowView)]
    server.worker.submit(Ticket(list(asked), found.extend, True))
    eventually(lambda: sum(view.done for _, view in views()) == len(asked))
    return [[view for choice, view in views() if choice == i] for i in range(len(asked))]


def test_chunks_of_a_long_prompt_are_seen_before_its_first_token(serve, unlimited):
    server = serve(prefix_budget=0)
    [views] = views_of(server, (TOKENIZER.encode(TEXT[:40]), SamplingParams(3, seed=1)))
    assert [(view.length, view.first_token is None, view.done, view.cached) for view in views] == [
        (16, True, False, -1), (32, True, False, -1), (40, False, False, -1),
        (41, False, False, -1), (42, False, True, -1)]
    assert_free(server.worker)


def test_a_preempted_request_has_no_row_and_a_waiting_one_no_view(serve, unlimited):
    budget = budget_for(MODEL, 2, LONGEST, LONGEST // 4, 4)
    server = serve(rows=2, kv_budget=budget, prefix_budget=0)
    recorder, params = Recorder(server.engine), SamplingParams(36, seed=1)
    asked = [(TOKENIZER.encode(text), params) for text in (TEXT[:20], TEXT[3:15], 'abc')]
    found = views_of(server, *asked)
    for number, views in enumerate(found):
        states = dropwhile(lambda state: state['row'] < 0,
                           (state for state, _ in recorder.states[number]))
        assert [(view.row, view.length, view.done) for view in views] == [
            (state['row'], state['length'], state['done']) for state in states]
    views = found[1]
    gone = [k for k, view in enumerate(views) if view.row < 0]
    assert gone and all(views[k].length == views[k].nbytes == 0 and views[k].pages == ()
                        for k in gone)
    assert views[gone[0] - 1].length > 12 and views[gone[-1] + 1].length > 12
    assert_free(server.worker)


def test_many_watched_requests_have_as_many_views_as_eight(monkeypatch):
    now, due = [100.0], []
    monkeypatch.setattr('serving.worker.time', SimpleNamespace(monotonic=lambda: now[0]))
    for n in (1, 8, 64):
        engine = Mock(cache=SimpleNamespace(batch_size=n), views=dict.fromkeys(range(n)))
        worker = Worker([engine], 0, None)  # not started
        ticket = Ticket([], None)
        worker._choices = {(engine, i): Choice(engine, i, ticket, 0) for i in range(n)}
        deliveries = defaultdict(list)
        for _ in range(1000):
            worker._add_views(engine, deliveries)
            now[0] += 0.01
        due.append(len(deliveries[ticket]) / 10)  # a second
    assert due == pytest.approx([20, 160, 160], rel=0.05)


@pytest.mark.parametrize('path, watched, fields', [
    (COMPLETIONS, WATCHED, dict(prompt=TEXT[:20], logprobs=2)),
    (CHAT, WATCHED_CHAT, dict(messages=[USER], logprobs=True, top_logprobs=2))])
def test_data_lines_are_those_of_v1(serve, unlimited, path, watched, fields):
    server = serve(prefix_budget=0)

    def documents(text):
        *found, done, end = text.split('\n\n')
        assert (done, end) == ('data: [DONE]', '')
        found = [json.loads(line.removeprefix('data: ')) for line in found]
        return [{key: value for key, value in document.items() if key not in ('id', 'created')}
                for document in found]
    for wrong, param in ({}, 'stream'), (dict(stream=True, n=2), 'n'):  # it streams one choice
        assert_refused(server.post(watched, fields | wrong), 400, param=param)
    fields |= dict(max_tokens=9, stream_options={'include_usage': True})
    plain = read(watch(server, path, **fields))
    shown = read(watch(server, watched, **fields))
    assert plain[0] == [] and shown[0]
    assert documents(plain[1]) == documents(shown[1])
    assert [' 9 completion tokens, TTFT ' in line for line in server.logged[2:]] == [True, True]
    for route in (path, watched):
        assert server.metric('requests_total', route=route, status='200') == 1


def test_a_failed_step_and_an_error_within_a_stream(serve, unlimited, monkeypatch, interrupt):
    server = serve(prefix_budget=10 ** 6)
    steps = interrupt('engine.engine.Engine._forward', {2: 'before', 5: 'before'}.get, MemoryError)
    monkeypatch.setattr(server.engine, 'fast_decode', None)
    monkeypatch.setattr('serving.worker.log.disabled', True)
    events = pages_carried(read(watch(server, prompt=TEXT[:20], max_tokens=8))[0])
    assert server.metric('failed_steps_total') == 2
    texts = ''.join(text for event in events for text in event['texts'])
    assert texts == TEXT[:20] + expected(TEXT[:20], 8, seed=1).text
    assert [event['done'] for event in events] == [False] * (len(events) - 1) + [True]
    assert_free(server.worker)
    steps.clear()
    hook = MODEL.register_forward_hook(
        lambda module, args, out: (out[0] * float('nan'), out[1]) if len(steps) > 1 else None)
    try:
        response = server.client.post(WATCHED, json=dict(prompt=TEXT[3:43], stream=True))
    finally:
        hook.remove()
    events, rest = read(response.text)
    assert response.status_code == 200 and 'not finite' in rest and '[DONE]' not in rest
    assert events and not any(event['done'] for event in events)
    assert_free(server.worker)
