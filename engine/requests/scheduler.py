"""Which requests run, in which rows, and what each engine step computes. Pure Python: no tensors,
no model.

    waiting   [r7, r8, ...]         first come, first served, but clients in turn
    running   row  0   1   2   3    always the first rows, so that a decode step takes one slice:
                   r2  r6  r1  r5   when a request leaves, the last row moves into its place

Each step decodes a token for every request that lacks only its last one, and prefills at most
`prefill_chunk` tokens, or `alone` if there are none (chunked prefill, Agrawal et al. 2023, Sarathi;
iteration-level scheduling, Yu et al. 2022, Orca). When pages run out, the latest request is
preempted, and recomputed later.
"""
import itertools
from collections import Counter, deque
from dataclasses import dataclass

from common.errors import UserError
from engine.requests.request import Request


@dataclass
class Work:
    """One step: chunks of prompts, at most one of each, and the requests that decode."""
    prefill: list[tuple[Request, int]]  # (request, tokens)
    decode: list[Request]

    @property
    def parts(self) -> list[tuple[Request, int]]:
        return self.prefill + [(request, 1) for request in self.decode]


class Scheduler:
    """Assigns rows and pages of `cache`, a `PagedKVCache`, to requests.

    prefill_chunk: maximum number of prompt tokens computed per step. alone: the same while no row
        decodes; 0 = no difference.
    prefix: an `engine.prefix.store.PrefixStore` of that cache, or None.
    """

    def __init__(self, cache, prefill_chunk: int, prefix=None, alone: int = 0):
        if prefill_chunk < 1:
            raise UserError(f'prefill_chunk={prefill_chunk}: must be at least 1')
        self.cache, self.prefill_chunk, self.prefix = cache, prefill_chunk, prefix
        self.alone = alone or prefill_chunk
        self.waiting, self.running = deque(), []
        self.num_steps = 0

    def check(self, n_prompt: int, max_new_tokens: int) -> None:
        """Raise UserError if a request of this size could never run."""
        positions, table = n_prompt + max_new_tokens - 1, self.cache.table
        asked = (f'{n_prompt} prompt tokens and max_new_tokens={max_new_tokens} take '
                 f'{positions:,} positions')
        if positions > self.cache.max_seq_len:
            raise UserError(f'{asked}, and max_seq_len is {self.cache.max_seq_len:,}')
        if table.pages_for(positions) > table.n_pages:
            raise UserError(f'{asked}, and the KV memory holds '
                            f'{table.n_pages * table.page_size:,}: more than any request may have')

    def schedule(self) -> Work:
        """Return the work of the next step, after taking rows and pages for it."""
        self.num_steps += 1
        decode = self._reserve_decoding()
        self._admit()
        return Work(self._chunks(self.prefill_chunk if decode else self.alone), decode)

    def may_preempt(self) -> bool:
        """Whether pages may run out in the next step."""
        table = self.cache.table
        if table.n_available >= len(self.running):
            return False
        needed = sum(table.pages_needed(r.row, r.length) for r in self.running if r.decoding)
        return needed > table.n_available

    def finish(self, request: Request, reusable: bool = True) -> None:
        """Remove a request, running or waiting, and free its row and pages. reusable: whether
        later requests may reuse what it computed since its last complete block."""
        if request.row < 0:
            self.waiting = deque(r for r in self.waiting if r is not request)
        else:
            self._free_row(request, reusable)

    def computed(self, request: Request, n: int) -> None:
        """Record that n more tokens of a request are in the cache."""
        request.num_computed_tokens += n
        blocks = request.num_computed_tokens // self.prefix.size if self.prefix else 0
        if self.prefix and blocks > request.last_block.depth:
            tokens = request.prompt + request.tokens
            request.last_block = self.prefix.extend(request.row, request.last_block, tokens)

    def preempt(self, request: Request) -> None:
        """Move a running request to the front of the queue."""
        self._free_row(request)
        request.num_computed_tokens = 0
        request.preempted += 1
        self.waiting.appendleft(request)

    def restart(self, requests: list[Request]) -> None:
        """After an error and a reset of the cache: queue all unfinished requests in order."""
        for request in requests:
            if request.row >= 0:
                request.preempted += 1
            request.row, request.num_computed_tokens, request.in_flight = -1, 0, 0
            request.last_block = None
        self.waiting, self.running = deque(sorted(requests, key=lambda r: r.number)), []

    def _reserve_decoding(self) -> list[Request]:
        """The decoding requests, each with a page for its next token; earlier requests come first,
        and the latest are preempted when pages run out."""
        table = self.cache.table
        for request in sorted((r for r in self.running if r.decoding), key=lambda r: r.number):
            while request.row >= 0 and (n := table.pages_needed(request.row, request.length)):
                if n <= table.n_available:
                    self.cache.reserve(request.row, request.length)
                    break
                self.preempt(max(self.running, key=lambda r: r.number))
        return [r for r in self.running if r.decoding]

    def _admit(self) -> None:
        table = self.cache.table
        while self.waiting and len(self.running) < self.cache.batch_size:
            request = self._next_waiting()
            available, needed = table.n_available, table.pages_for(request.length)
            if any(table.pages_for(r.max_positions) > len(table.rows[r.row]) for r in self.running):
                needed += 1  # so that a running request that grows does not preempt the new one
            if self.prefix:
                hit = self.prefix.match(request.prompt + request.tokens, request.salt)
                available = self.prefix.n_available(hit.blocks)
                needed -= sum(block.page >= 0 for block in hit.blocks)
            if available < needed or self.prefix and self._is_being_computed(request, hit.length):
                return
            self.waiting.remove(request)
            request.row = len(self.running)
            self.running.append(request)
            if self.prefix:
                self._restore(request, hit)
            self.cache.reserve(request.row, request.length)
            if request.due < 0:
                request.due = self.due(request)

    def _next_waiting(self) -> Request:
        """The first one of the client with the fewest running requests; before all, one that was
        preempted."""
        n_running = Counter(request.client for request in self.running)
        return min(self.waiting, key=lambda r: (not r.preempted, n_running[r.client]))

    def due(self, request) -> int:
        """The step in which a prompt would be complete if it was computed alone from now on. The
        earliest goes first: short prompts pass long ones, but not forever."""
        return self.num_steps + request.pending // self.prefill_chunk

    def _restore(self, request, hit) -> None:
        request.last_block = self.prefix.restore(request.row, hit)
        request.num_computed_tokens = self.cache.length(request.row)
        request.chunk_ends = self.prefix.chunk_ends(hit, request.length)
        if request.num_cached_tokens < 0:  # not after a preemption
            request.num_cached_tokens = request.num_computed_tokens
            stats = self.prefix.stats
            stats.requests += 1
            stats.looked_up += request.length
            stats.found += request.num_cached_tokens

    def _is_being_computed(self, request, n_cached) -> bool:
        """Whether a running request is about to compute a longer prefix of this one than is cached,
        e.g. another sample of the same prompt."""
        mine = request.prompt + request.tokens
        for other in self.running:
            if not other.decoding and other.salt == request.salt:
                pairs = zip(mine[:-1], other.prompt + other.tokens)
                common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
                reusable = self.prefix.shareable(other.chunk_ends, common)
                if reusable > max(n_cached, other.num_computed_tokens):
                    return True
        return False

    def _chunks(self, left: int) -> list[tuple[Request, int]]:
        """The next chunks of prompts, `left` tokens in all. A chunk ends where later requests can
        resume (`chunk_ends`)."""
        chunks = []
        prefilling = (r for r in self.running if not (r.decoding or r.finishing))
        for request in sorted(prefilling, key=lambda r: (r.due, r.number)):
            if left == 0:
                break
            start = request.num_computed_tokens
            last = start + min(request.pending, left)
            end = min([last, *(end for end in request.chunk_ends if end > start)])
            chunks.append((request, end - start))
            left -= end - start
        return chunks

    def _free_row(self, request: Request, reusable: bool = True) -> None:
        row, last = request.row, self.running[-1]
        # an interrupted recovery may have reset the row
        if (self.prefix and reusable and request.last_block is not None
                and self.cache.length(row) == request.num_computed_tokens):
            self.prefix.end(row, request.last_block, request.prompt + request.tokens)
        self.cache.reset([row])
        if self.prefix:
            self.prefix.release(request.last_block)
            request.last_block = None
        self.running[row] = last
        self.running.pop()
        if last is not request:
            self.cache.move(last.row, row)
            last.row = row
        request.row = -1
