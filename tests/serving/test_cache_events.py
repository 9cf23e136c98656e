"""The stream of cache events: each states what the engine and its tensors hold at that moment."""
import asyncio
import itertools
import json
from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from engine.engine import Engine
from engine.requests.params import SamplingParams
from engine.pages.view import RowView
from serving.app import Generation
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


@contextmanager
def not_finite(when):
    """Logits are NaN while `when()`."""
    hook = MODEL.register_forward_hook(
        lambda module, args, out: (out[0] * float('nan'), out[1]) if when() else None)
    try:
        yield
    finally:
        hook.remove()


def test_the_plan_document_is_the_plans_arithmetic(serve):
    server = serve()
    plan, dtype = MODEL.plan, 'float64'
    found = server.client.get(PLAN).json()
    slots, gemma = found.pop('slots'), found.pop('gemma_slots')
    # one K/V head, since 4 heads have no third; of the global layer only K
    assert gemma == [[5, 2 * 6 * 8]] * 5 + [[0, 6 * 8]] + [[5, 2 * 6 * 8]]
    assert found == dict(
        model='tiny', dataset='', parameters=sum(p.numel() for p in MODEL.parameters()),
        max_positions=LONGEST, max_seq_len=LONGEST, block_size=64, kv_dtype=dtype,
        page_size=4, pages=server.engine.cache.table.n_pages, rows=3,
        vanilla_position_nbytes=7 * 2 * 4 * 6 * 8,
        vanilla_position_nbytes_bf16=7 * 2 * 4 * 6 * 2)
    assert [(slot['slot'], slot['kind'], slot['window'], slot['owner'], slot['layers'])
            for slot in slots] == [(s.index, s.kind, s.window, s.owner, list(s.layers))
                                   for s in plan.slots]
    assert {slot['position_nbytes'] for slot in slots} == {2 * 6 * 8}
    assert sum(slot['capacity'] * slot['position_nbytes'] + slot['state_nbytes']
               for slot in slots) == plan.nbytes(1, LONGEST, dtype)
    assert {layer for slot in slots for layer in slot['layers']} == set(range(7))
    assert server.logged == []


def test_events_agree_with_the_engine_past_a_rings_wrap_and_after_prefix_hits(serve, unlimited):
    server = serve()
    recorder, text = Recorder(server.engine), TEXT[:37]
    for number, prompt in enumerate((text, text, text[:30] + 'abcd')):
        stream = watch(server, prompt=prompt, max_tokens=8,
                       stream_options={'include_usage': True})
        usage = json.loads(read(stream)[1].split('\n\n')[-3].removeprefix('data: '))['usage']
        cached = usage['prompt_tokens_details']['cached_tokens']
        assert (cached > 0) == (number > 0)
        completion = expected(prompt, 8, seed=1)
        events = assert_agree(recorder, number, stream, prompt + completion.text)
        assert events[-1]['cached'] == cached and events[-1]['length'] == len(prompt) + 7
        assert all(event['length'] >= cached for event in events)
    assert_free(server.worker)


def test_rows_that_share_pages(serve, held, unlimited):
    server = serve(rows=2)
    recorder = Recorder(server.engine)
    threads = [in_background(lambda: watch(server, prompt=TEXT[:34], max_tokens=12))
               for _ in range(2)]
    server.wait_for(2)
    held.set()
    for thread in threads:
        thread.join()
    text = TEXT[:34] + expected(TEXT[:34], 12, seed=1).text
    # the engine's first request is the one that found nothing in the prefix cache
    streams = sorted((thread.result for thread in threads), key=lambda s: '"cached": 0,' not in s)
    assert ['"cached": 0,' in stream for stream in streams] == [True, False]
    users = [users for number, stream in enumerate(streams)
             for event in assert_agree(recorder, number, stream, text)
             for _, users in event['pages']]
    assert max(users) == 3  # both rows and the prefix cache
    assert_free(server.worker)


def deliveries(server, asked, n=1):
    """[(choice, Event or RowView)] that the worker delivers for a watched request."""
    found = []
    server.worker.submit(Ticket(asked, found.extend, True))
    eventually(lambda: sum(is_last(item) for item in list(found)) == n)
    return found


def is_last(item):
    return isinstance(item[1], RowView) and item[1].done


def test_chunks_of_a_long_prompt_are_seen_before_its_first_token(serve, unlimited):
    server = serve(prefix_budget=0)
    ids = TOKENIZER.encode(TEXT[:40])
    items = [item for _, item in deliveries(server, [(ids, SamplingParams(3, seed=1))])]
    kinds = [(item.length, item.done) if isinstance(item, RowView) else item.token >= 0
             for item in items]
    assert kinds == [(16, False), (32, False), True, (40, False), True, (41, False),
                     True, (42, True)]
    assert [item.cached for item in items if isinstance(item, RowView)] == [-1] * 5
    assert_free(server.worker)


def test_a_preempted_request_has_no_row(serve, unlimited):
    budget = budget_for(MODEL, 2, LONGEST, LONGEST // 4, 4)
    server = serve(rows=2, kv_budget=budget, prefix_budget=0)
    recorder, params = Recorder(server.engine), SamplingParams(36, seed=1)
    found = deliveries(server, [(TOKENIZER.encode(TEXT[:20]), params),
                                (TOKENIZER.encode(TEXT[3:15]), params)], 2)
    for number in range(2):
        views = [item for choice, item in found if choice == number and isinstance(item, RowView)]
        states = [state for state, *_ in recorder.states[number]]
        assert [(view.row, view.length) for view in views] == [
            (state['row'], state['length']) for state in states]
        shrinks = [b.row for a, b in zip(views, views[1:]) if b.length < a.length]
        assert set(shrinks) <= {-1} and [view.done for view in views].count(True) == 1
        assert views[-1].done
    gone = [k for k, view in enumerate(views) if view.row < 0]  # of the second request
    assert gone and all(views[k].length == views[k].nbytes == 0 and views[k].pages == ()
                        for k in gone)
    assert views[gone[0] - 1].length > 12 and views[gone[-1] + 1].length > 12
    assert_free(server.worker)


def test_a_waiting_request_has_no_view(serve, held, unlimited):
    server, found = serve(rows=1), []
    server.worker.submit(Ticket([([1, 2], SamplingParams(5))], lambda items: None))
    server.worker.submit(Ticket([([1, 2], SamplingParams(5))], found.extend, True))
    held.set()
    eventually(lambda: found and is_last(found[-1]))
    assert all(item.row == 0 for _, item in found if isinstance(item, RowView))


def test_many_watched_requests_have_as_many_views_as_eight(monkeypatch):
    now, due = [100.0], []
    monkeypatch.setattr('serving.worker.time', SimpleNamespace(monotonic=lambda: now[0]))
    for n in (1, 8, 64):
        engine = SimpleNamespace(cache=SimpleNamespace(batch_size=n), view=lambda i: 'view',
                                 watched=dict.fromkeys(range(n)))
        worker = Worker(engine, 0, None)  # not started
        ticket = Ticket([], None)
        worker._choices = {i: Choice(i, ticket, 0, False) for i in range(n)}
        deliveries = defaultdict(list)
        for _ in range(1000):
            worker._add_views(deliveries)
            now[0] += 0.01
        due.append(len(deliveries[ticket]) / 10)  # a second
    assert due == pytest.approx([20, 160, 160], rel=0.05)


def test_only_the_newest_of_waiting_views_is_sent():
    views = [RowView(0, n, -1, (), (0, 0), 0, 0, 0, 0, 0, 0, n == 3, 0.0, None) for n in range(4)]
    items = [(0, 'a'), (0, views[1]), (0, 'b'), (0, views[2]), (0, 'c'), (0, views[3])]
    reply = SimpleNamespace(take=lambda choice, event: [event],
                            cache_event=lambda view, received: view)

    async def sent(*batches):
        generation = Generation(None, None, None)
        generation.reply = reply
        for batch in batches:
            generation.inbox.put_nowait(batch)
        return await generation._next_documents()
    assert asyncio.run(sent(items[:2], items[2:])) == ['a', 'b', 'c', views[3]]
    assert asyncio.run(sent(items[:5])) == ['a', 'b', views[2], 'c']
    assert asyncio.run(sent(items[:1])) == ['a']


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
    fields |= dict(max_tokens=9, stream_options={'include_usage': True})
    plain = read(watch(server, path, **fields))
    shown = read(watch(server, watched, **fields))
    assert plain[0] == [] and shown[0]
    assert documents(plain[1]) == documents(shown[1])
    assert [' 9 completion tokens, TTFT ' in line
            for line in server.logged] == [True, True]
    for route in (path, watched):
        assert server.metric('requests_total', route=route, status='200') == 1


@pytest.mark.parametrize('path, valid', [(WATCHED, dict(prompt='a')),
                                         (WATCHED_CHAT, dict(messages=[USER]))])
def test_requests_that_are_refused(serve, path, valid):
    server = serve()
    for fields, status, named, param in [
            ({}, 400, 'stream', 'stream'), (dict(stream=False), 400, 'stream', 'stream'),
            (dict(stream=True, n=2), 400, '2 choices', 'n'),
            (dict(stream=True, bogus=2), 400, 'bogus', 'bogus')]:
        response = server.client.post(path, json=valid | fields)
        assert_refused(response, status, named, param=param)
    assert_free(server.worker)


def test_a_failed_step_and_an_error_within_a_stream(serve, unlimited, monkeypatch):
    server, steps, plain = serve(prefix_budget=10 ** 6), [], Engine._forward

    def forward(engine, *args):
        steps.append(1)
        if len(steps) in (2, 5):
            raise MemoryError
        return plain(engine, *args)
    monkeypatch.setattr(Engine, '_forward', forward)
    monkeypatch.setattr(server.engine, 'fast_decode', None)
    monkeypatch.setattr('serving.worker.log.disabled', True)
    events = pages_carried(read(watch(server, prompt=TEXT[:20], max_tokens=8))[0])
    assert server.metric('failed_steps_total') == 2
    texts = ''.join(text for event in events for text in event['texts'])
    assert texts == TEXT[:20] + expected(TEXT[:20], 8, seed=1).text
    assert [event['done'] for event in events] == [False] * (len(events) - 1) + [True]
    assert_free(server.worker)
    steps.clear()
    with not_finite(lambda: len(steps) > 1):
        response = server.client.post(WATCHED, json=dict(prompt=TEXT[3:43], stream=True))
    events, rest = read(response.text)
    assert response.status_code == 200 and 'not finite' in rest and '[DONE]' not in rest
    assert events and not any(event['done'] for event in events)
    assert 'TTFT' not in server.logged[-1]  # a cache event is no token
    assert_free(server.worker)


def test_tokens_that_come_with_an_error_precede_it(serve, monkeypatch):
    """The event loop was busy, and finds both at once."""
    server, next_documents = serve(), Generation._next_documents

    async def late(self):
        while not self.started and (self.inbox.empty() or server.engine.n_unfinished):
            await asyncio.sleep(0.01)
        return await next_documents(self)
    monkeypatch.setattr(Generation, '_next_documents', late)
    monkeypatch.setattr(server.engine, 'fast_decode', None)
    steps = itertools.count()
    with not_finite(lambda: next(steps) > 3):
        response = server.client.post(COMPLETIONS, json=dict(prompt='abc', stream=True, seed=1))
    *texts, error, _ = response.text.split('\n\n')
    assert response.status_code == 200 and 'not finite' in error
    assert ''.join(json.loads(text.removeprefix('data: '))['choices'][0]['text']
                   for text in texts) == expected('abc', seed=1).text[:4]


def test_unwatched_requests_take_no_view(serve, unlimited, monkeypatch):
    server = serve()
    monkeypatch.setattr(Engine, 'view', lambda *args: 1 / 0)
    assert server.text(seed=1) == expected('abc', seed=1).text
    assert server.metric('failed_steps_total') == 0
