"""A simulated chat workload on the prefix cache, without a model, so that it runs quickly.

Users talk in sessions: about ten turns a minute apart, then hours of absence. Some turns replace
the last message, some go back to an earlier one. A conversation that has filled its context is
replaced. The parameters are our guesses, except that 180 earlier messages is Character.AI's mean.
"""
import heapq
from dataclasses import dataclass

import numpy as np
import torch

from engine.paged import PagedKVCache
from engine.prefix import PrefixStore
from lab.benchmarks.clock import progress

THINK_S, AWAY_S, SESSION_TURNS = 60.0, 4 * 3600.0, 10
EDITED, WENT_BACK = 0.05, 0.02  # shares of turns
FARTHEST_BACK = 20  # messages
CHUNK = 256  # tokens


@dataclass
class Workload:
    """Requests in order of arrival."""
    dialogues: int       # alive at any time
    messages: int        # mean number of messages per dialogue at the start (log-normal)
    message_tokens: int  # mean length of a message or a reply (log-normal)
    max_seq_len: int     # of an entire dialogue
    vocab_size: int = 50257
    seed: int = 0

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)
        dialogues = range(self.dialogues)
        self.texts = [self._history() for _ in dialogues]  # arrays of ids: each one's messages
        self.left = [self._session() for _ in dialogues]   # turns until the user leaves
        self.events = [(self.random.exponential(AWAY_S) * self.random.random(), i)
                       for i in dialogues]
        heapq.heapify(self.events)

    def next(self) -> tuple[int, list[int], int]:
        """Return (dialogue, tokens of the request, tokens of its reply)."""
        now, i = heapq.heappop(self.events)
        self.left[i] -= 1
        gap = self.random.exponential(THINK_S)
        if self.left[i] <= 0:
            self.left[i], gap = self._session(), self.random.exponential(AWAY_S)
        heapq.heappush(self.events, (now + gap, i))
        kind = self.random.random()
        if kind < EDITED:
            del self.texts[i][-2:]
        elif kind < EDITED + WENT_BACK:
            back = 2 * int(self.random.integers(1, FARTHEST_BACK // 2 + 1))
            del self.texts[i][-back:]
        message, reply = self._message(), len(self._message())
        if sum(map(len, self.texts[i])) + len(message) + reply > self.max_seq_len:
            self.texts[i] = []
        self.texts[i].append(message)
        return i, np.concatenate(self.texts[i]).tolist(), reply

    def tokens(self, n: int) -> list[int]:
        return self.random.integers(self.vocab_size, size=n).tolist()

    def _history(self):
        n = int(self.random.lognormal(np.log(self.messages) - 0.25, 0.7)) if self.messages else 0
        messages, room = [self._message() for _ in range(n // 2 * 2)], self.max_seq_len // 2
        while sum(map(len, messages)) > room:
            del messages[:2]
        return messages

    def _message(self):
        n = max(1, int(self.random.lognormal(np.log(self.message_tokens) - 0.125, 0.5)))
        return self.random.integers(self.vocab_size, size=min(n, self.max_seq_len // 8))

    def _session(self):
        return int(self.random.geometric(1 / SESSION_TURNS))


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
        store.stats.requests += 1
        store.stats.looked_up += len(tokens)
        store.stats.found += found
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

    def compact(self) -> None:
        """Drop all that goes before a conversation as a whole does."""
        while self.store.has_droppable_parts:
            self.store.shrink_to(self.store.nbytes - 1)

    @property
    def held_nbytes(self) -> int:
        """Bytes of everything cached: in host memory, and in pages without a copy there."""
        only_in_pool = sum(block.page >= 0 and block.copy is None
                           for block in self.store.blocks)
        return self.store.nbytes + only_in_pool * self.store.copier.page_nbytes


def simulate(plan, workload: Workload, n_requests: int, page_size: int, kv_dtype: str, budget: int,
             title: str = '') -> dict:
    """Serve requests until every dialogue has had one, then measure `n_requests` more."""
    served, seen = Served(plan, workload.max_seq_len, page_size, kv_dtype, budget), set()

    def one() -> tuple[int, int, int]:
        """Serve one request: (dialogue, number of tokens, number of cached tokens)."""
        i, tokens, n_reply = workload.next()
        reply = workload.tokens(n_reply)
        found = served.serve(tokens, reply)
        workload.texts[i].append(np.array(reply))
        return i, len(tokens), found

    while len(seen) < workload.dialogues:
        seen.add(one()[0])
    before = vars(served.store.stats).copy()
    found = [one()[1:] for _ in progress(range(n_requests), title)]
    stats = {name: value - before[name] for name, value in vars(served.store.stats).items()}
    held = sum(sum(map(len, text)) for text in workload.texts)
    vanilla = plan.vanilla().nbytes(1, 1, 'bfloat16')
    return stats | {
        'page_size': page_size, 'budget': budget,
        'hit_rate': stats['found'] / stats['looked_up'],
        'computed_per_request': sum(n - k for n, k in found) / n_requests,
        'prompt_tokens_per_request': sum(n for n, _ in found) / n_requests,
        'held_nbytes': served.held_nbytes, 'dialogue_tokens': held,
        'dialogues': workload.dialogues, 'vanilla_nbytes': vanilla * held,
        'blocks': len(served.store.blocks)}
