"""Read streams of cache events, and compare them with the engine's own state and tensors."""
import json

import torch

from kv.plan import GLOBAL
from tests.helpers.serving import TOKENIZER
from tests.serving.conftest import LONGEST, MODEL


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
        assert ('pages' in event) == ('prefix_pages' in event)
        new = {name: event[name] for name in ('pages', 'prefix_pages') if name in event}
        assert not new or new != carried  # only sent if changed
        carried |= new
        whole.append(event | carried)
    return whole


class Recorder:
    """States of an engine's rows after each of its steps and before a row is freed, from its own
    bookkeeping and tensors. states: number of a request -> [(state, stored K/V, token ids)]."""

    def __init__(self, engine):
        self.engine, self.states, step, end = engine, {}, engine.step, engine._end

        def recording_step():
            events = step()
            for number in engine.jobs:
                self.record(number)
            return events

        def recording_end(job, *args, **kwargs):
            self.record(job.request.number, done=True)
            return end(job, *args, **kwargs)
        engine.step, engine._end = recording_step, recording_end

    def record(self, number, done=False):
        cache, request = self.engine.cache, self.engine.jobs[number].request
        table, row = cache.table, request.row
        pages = list(table.rows[row]) if row >= 0 else []
        rows = [request.row for request in self.engine.scheduler.running]
        users = [sum(page in table.rows[r] for r in rows) for page in pages]
        pinned = [self.engine.prefix is not None and any(
            block.page == page for block in self.engine.prefix.blocks) for page in pages]
        state = dict(
            row=row, length=int(cache.lengths[row]) if row >= 0 else 0, done=done,
            prompt=len(request.prompt), cached=request.num_cached_tokens,
            pages=[[page, n + kept] for page, n, kept in zip(pages, users, pinned)],
            prefix_pages=pinned, running=len(rows), waiting=len(self.engine.scheduler.waiting),
            free_pages=table.n_pages - len({p for r in rows for p in table.rows[r]}
                                           | table.pinned),
            held_nbytes=cache.held_nbytes, nbytes=self.nbytes(row, pages),
            prefix_nbytes=self.engine.prefix.nbytes if self.engine.prefix else 0)
        stored = self.stored(row, pages) if row >= 0 else []
        self.states.setdefault(number, []).append((state, stored, request.prompt + request.tokens))

    def nbytes(self, row, pages) -> int:
        """Counted from the tensors."""
        rings = sum(x[:1].numel() * x.element_size() for store in self.engine.cache.row_stores
                    for x in store.tensors)
        page = sum(x[:1].numel() * x.element_size() for pool in self.engine.cache.pools
                   for x in pool.tensors)
        return (rings + page * len(pages)) * (row >= 0)

    def stored(self, row, pages):
        """[K, V] of the row in each slot, (Hkv, capacity or positions of its pages, D)."""
        return [[x[pages].transpose(0, 1).flatten(1, 2) if slot.kind == GLOBAL else x[row].clone()
                 for x in store.tensors[:2]]
                for slot, store in zip(MODEL.plan.slots, self.engine.cache.stores)]


def assert_holds(length, stored, tokens):
    """Check the row's tensors, at the positions that the protocol derives from `length`, against
    K and V of one forward pass over all tokens."""
    cache, computed = MODEL.new_cache(1, LONGEST), {}
    append = cache.append

    def noted(layer, k, v):
        computed[layer.slot] = k[0], v[0]  # (Hkv, T, D)
        append(layer, k, v)
    cache.append = noted
    with torch.inference_mode():
        MODEL(torch.tensor([tokens[:length]]), cache=cache)
    for slot, held in zip(MODEL.plan.slots, stored):
        positions = slot.positions(length, LONGEST)
        n = length if slot.kind == GLOBAL else min(length, slot.window)
        assert max(positions) == length - 1 and len(positions) == n
        for x, wanted in zip(held, computed[slot.index]):
            assert (x[:, :n] - wanted[:, positions]).abs().max() < 1e-4


def assert_agree(recorder, number, stream, text):
    """Check all events of a stream of the engine's request `number`. Returns them."""
    events = pages_carried(read(stream)[0])
    times = [event['time'] for event in events]
    assert times == sorted(times) and times[0] >= 0
    first = [event['first_token'] for event in events]
    for event in events:
        known = event['first_token'] is not None
        assert known == (event['length'] >= event['prompt']) or event['row'] < 0
        assert not known or 0 < event['first_token'] == first[-1] <= event['time']
    assert [event['done'] for event in events] == [False] * (len(events) - 1) + [True]
    states, texts = iter(recorder.states[number]), []
    for event in events:  # in this order, some states may be left out
        event = dict(event)
        del event['time'], event['first_token']
        assert event.pop('texts_from') == len(texts)
        texts += event.pop('texts')
        stored, tokens = next(found for state, *found in states if state == event)
        assert texts == [TOKENIZER.decode([token]) for token in tokens] or event['done']
        if event['length']:
            assert_holds(event['length'], stored, tokens)
    assert ''.join(texts) == text
    return events
