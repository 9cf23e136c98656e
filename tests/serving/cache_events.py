"""Read streams of cache events, and compare them with the engine's own state."""
import json

from tests.helpers.serving import TOKENIZER


def read(stream: str) -> tuple[list[dict], str]:
    """The cache events of a stream, and the rest of it."""
    parts = stream.split('\n\n')
    named = 'event: cache\ndata: '
    events = [json.loads(part.removeprefix(named)) for part in parts if part.startswith(named)]
    rest = '\n\n'.join(part for part in parts if not part.startswith(named))
    assert not events or 'event:' not in rest
    return events, rest


def pages_carried(events):
    """The events, each with its pages, also where they are as before."""
    carried, whole = {}, []
    for event in events:
        new = {name: event[name] for name in ('pages', 'prefix_pages') if name in event}
        assert len(new) in (0, 2) and new != carried  # only sent if changed
        carried |= new
        whole.append(event | carried)
    return whole


class Recorder:
    """States of an engine's rows after each of its steps and before a row is freed, from its own
    bookkeeping. states: number of a request -> [(state, token ids)]."""

    def __init__(self, engine):
        self.engine, self.states, step, end = engine, {}, engine.step, engine._end

        def recording_step():
            events = step()
            for number in engine.requests:
                self.record(number)
            return events

        def recording_end(request, *args, **kwargs):
            self.record(request.number, done=True)
            return end(request, *args, **kwargs)
        engine.step, engine._end = recording_step, recording_end

    def record(self, number, done=False):
        cache, request = self.engine.cache, self.engine.requests[number]
        table, row, prefix = cache.table, request.row, self.engine.prefix
        pages = list(table.rows[row]) if row >= 0 else []
        rows = [request.row for request in self.engine.scheduler.running]
        users = [sum(page in table.rows[r] for r in rows) for page in pages]
        cached_pages = {block.page for block in prefix.blocks} if prefix else set()
        pinned = [page in cached_pages for page in pages]
        nbytes = sum(x[:1].nbytes for store in cache.row_stores for x in store.tensors)
        nbytes += len(pages) * sum(x[:1].nbytes for pool in cache.pools for x in pool.tensors)
        state = dict(
            row=row, length=int(cache.lengths[row]) if row >= 0 else 0, done=done,
            prompt=len(request.prompt), cached=request.num_cached_tokens,
            pages=[[page, n + kept] for page, n, kept in zip(pages, users, pinned)],
            prefix_pages=pinned, running=len(rows), waiting=len(self.engine.scheduler.waiting),
            free_pages=table.n_pages - len({p for r in rows for p in table.rows[r]}
                                           | table.pinned),
            held_nbytes=cache.held_nbytes, nbytes=nbytes if row >= 0 else 0,
            prefix_nbytes=prefix.nbytes if prefix else 0)
        self.states.setdefault(number, []).append((state, request.prompt + request.tokens))


def assert_agree(recorder, number, stream, text):
    """Check all events of a stream of the engine's request `number`. Returns them."""
    events = pages_carried(read(stream)[0])
    times = [event['time'] for event in events]
    assert times == sorted(times) and times[0] >= 0
    assert [event['done'] for event in events] == [False] * (len(events) - 1) + [True]
    states, texts = iter(recorder.states[number]), []
    for event in events:  # in this order, some states may be left out
        event = dict(event)
        time, first_token = event.pop('time'), event.pop('first_token')
        assert (first_token is None) == (event['length'] < event['prompt'])
        assert first_token is None or 0 < first_token == events[-1]['first_token'] <= time
        assert event.pop('texts_from') == len(texts)
        texts += event.pop('texts')
        tokens = next(tokens for state, tokens in states if state == event)
        assert texts == [TOKENIZER.decode([token]) for token in tokens] or event['done']
    assert ''.join(texts) == text
    return events
