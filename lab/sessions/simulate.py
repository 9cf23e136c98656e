"""Replays a trace on the prefix cache alone, without a model: what is recomputed at which size."""
import numpy as np
import torch

from engine.pages.cache import PagedKVCache
from engine.prefix.store import PrefixStore
from lab.benchmarks.clock import progress
from lab.sessions.known import Known
from lab.sessions.trace import Trace

UNLIMITED = 10 ** 15  # bytes
CHUNK = 256           # tokens of a prompt that are computed at a time


def texts(trace: Trace):
    """Yield (tokens of the prompt, tokens of the reply) by time of arrival."""
    for session, i in trace.in_order():
        parts = [trace.system(session)]
        for k in session.lineage(i)[:-1]:
            parts += trace.message(session, k), trace.reply(session, k)
        yield np.concatenate([*parts, trace.message(session, i)]), trace.reply(session, i)


def unavoidable(trace: Trace) -> dict:
    """Totals of a trace: prompt tokens, those that no cache could have saved, and reply tokens."""
    known, totals = Known(), np.zeros(3, dtype=int)
    for prompt, reply in texts(trace):
        totals += len(prompt), known.unavoidable(prompt), len(reply)
        known.add(np.concatenate([prompt, reply[:-1]]))  # the last one is never an input
    return dict(zip(('prompt_tokens', 'unavoidable', 'reply_tokens'), map(int, totals)))


class Served:
    """One row of a paged cache with a prefix store, serving one request at a time; K and V are
    random numbers."""

    def __init__(self, plan, max_seq_len: int, page_size: int, kv_dtype: str, budget: int):
        n_pages = -(-max_seq_len // page_size) + 1  # for one request: the rest is in host memory
        self.cache = PagedKVCache(plan, 1, max_seq_len, n_pages=n_pages, page_size=page_size,
                                  kv_dtype=kv_dtype)
        self.store, self.chunk = PrefixStore(self.cache, budget), max(CHUNK, page_size)
        self.kv = [torch.randn(1, slot.n_kv_head, self.chunk, slot.head_dim) for slot in plan.slots]

    def serve(self, tokens: list[int], reply: list[int]) -> int:
        """Serve a request as the engine would. Returns the number of tokens found in the cache."""
        store = self.store
        hit = store.match(tokens)
        self.last_block = store.restore(0, hit)
        found, stops = self.cache.length(0), store.chunk_ends(hit, len(tokens))
        for stop in [*stops, len(tokens)]:
            while self.cache.length(0) < stop:
                self._feed(tokens, min(stop, self.cache.length(0) + self.chunk))
        said, size = tokens + reply[:-1], store.size  # the last sampled token is not an input
        while self.cache.length(0) < len(said):
            self._feed(said, min(len(said), (self.cache.length(0) // size + 1) * size))
        store.end(0, self.last_block, said)
        self.cache.reset([0])
        store.release(self.last_block)
        return found

    def _feed(self, tokens, end):
        n = end - self.cache.length(0)
        self.cache.begin(n)
        for slot, kv in zip(self.cache.plan.slots, self.kv):
            self.cache.append(self.cache.plan.layers[slot.owner], kv[:, :, :n], kv[:, :, :n])
        self.cache.commit()
        self.last_block = self.store.extend(0, self.last_block, tokens[:end])

    @property
    def held_nbytes(self) -> int:
        """Bytes of everything cached: in host memory, and in pages without a copy there."""
        only_in_pool = sum(block.page >= 0 and block.copy is None
                           for block in self.store.blocks)
        return self.store.nbytes + only_in_pool * self.store.copier.page_nbytes


def replay(trace: Trace, plan, kv_dtype: str, page_size: int, budget: int, title='') -> dict:
    """Serve one request after the other with so many bytes of prefix cache."""
    served = Served(plan, trace.longest + page_size, page_size, kv_dtype, budget)
    computed = most = 0
    for prompt, reply in progress(list(texts(trace)), title):
        computed += len(prompt) - served.serve(prompt.tolist(), reply.tolist())
        most = max(most, served.held_nbytes)
    return {'budget': budget, 'most_nbytes': most, 'computed': computed,
            'evicted': served.store.stats.evicted}


def simulate(trace: Trace, plan, shares: list[int], kv_dtype='int8', page_size=64) -> dict:
    """Replay with unlimited memory, and with shares (in percent) of what that takes."""
    totals, cells = unavoidable(trace), []
    for share in [100, *shares]:
        budget = cells[0]['most_nbytes'] * share // 100 if cells else UNLIMITED
        cell = replay(trace, plan, kv_dtype, page_size, budget, f'{trace.name}, {share}%')
        cells.append({'share': share} | cell | {
            'over_unavoidable': cell['computed'] / totals['unavoidable']})
    return {'trace': trace.name, 'seed': trace.seed, 'sessions': len(trace.sessions),
            'requests': trace.n_requests, 'longest': trace.longest, 'kv_dtype': kv_dtype,
            'page_size': page_size} | totals | {'cells': cells}
