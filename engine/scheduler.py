"""Which requests run, in which rows, and what each step of the engine computes. Pure Python: no
tensors, no model.

    waiting   [r7, r8, ...]         first come, first served
    running   row  0   1   2   3    always the first rows, so that a decode step takes one slice:
                   r2  r6  r1  r5   when a request leaves, the last row moves into its place

A request is *prefilling* while more than its last token is not yet in the cache, then *decoding*.
Each step decodes one token for all that decode, and prefills at most `prefill_chunk` tokens beside
it, so that a long prompt does not stall the others (chunked prefill, Agrawal et al. 2023, Sarathi;
iteration-level scheduling, Yu et al. 2022, Orca). When pages run out, the request that was admitted
last gives its own back and waits again; it is recomputed later and goes on as before.
"""
from collections import deque
from dataclasses import dataclass, field

from config.errors import UserError
from engine.params import SamplingParams


@dataclass(eq=False)
class Request:
    """A prompt, what is asked of it, and how far it has come. `number`: in the order of
    submission."""
    number: int
    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)  # generated
    # tokens (of prompt, then generated) that the cache has
    held: int = 0
    row: int = -1                                    # -1 = not running
    preempted: int = 0                               # times that it had to give its pages back
    # of a prefix store: the newest block that it has in it
    tip: object = None
    # lengths at which a chunk of it is to end, for that store
    stops: list[int] = field(default_factory=list)
    # tokens that it took over from there when it first ran
    found: int = -1

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def most(self) -> int:
        """Positions that it may come to hold; the last token drawn is never fed."""
        return len(self.prompt) + self.params.max_new_tokens - 1

    @property
    def pending(self) -> int:
        """Tokens that the cache lacks; 1 while decoding: the token drawn last."""
        return self.length - self.held

    @property
    def decoding(self) -> bool:
        return self.held > 0 and self.pending == 1

    def next_tokens(self, n: int) -> list[int]:
        """The first n of those that the cache lacks."""
        if self.held >= len(self.prompt):
            return self.tokens[self.held - len(self.prompt):][:n]
        return (self.prompt[self.held:self.held + n] + self.tokens)[:n]


@dataclass
class Work:
    """One step: forward passes over chunks of prompts, each [(request, tokens)], then one over all
    of `decode`."""
    prefill: list[list[tuple[Request, int]]]
    decode: list[Request]


class Scheduler:
    """Decides; the cache (a `engine.paged.PagedKVCache`, or in tests its bookkeeping alone) has the
    rows and pages.

    Args:
        cache: with `batch_size`, `max_seq_len`, `table` and the methods `reset`, `move` and
            `reserve`.
        prefill_chunk: most prompt tokens that a step computes, padding included.
        prefix: a `engine.prefix.PrefixStore` of that cache, or None: requests take over from it
            what they begin with.
    """

    def __init__(self, cache, prefill_chunk: int, prefix=None):
        if prefill_chunk < 1:
            raise UserError(f'prefill_chunk={prefill_chunk}: must be at least 1')
        self.cache, self.prefill_chunk, self.prefix = cache, prefill_chunk, prefix
        self.waiting, self.running = deque(), []

    def check(self, n_prompt: int, max_new_tokens: int) -> None:
        """UserError if such a request could never run."""
        # the last token drawn is never fed
        positions, table = n_prompt + max_new_tokens - 1, self.cache.table
        asked = (f'{n_prompt} prompt tokens and max_new_tokens={max_new_tokens} take '
                 f'{positions:,} positions')
        if positions > self.cache.max_seq_len:
            raise UserError(f'{asked}, and max_seq_len is {self.cache.max_seq_len:,}')
        if table.pages_for(positions) > table.n_pages:
            raise UserError(f'{asked}, and the KV memory holds '
                            f'{table.n_pages * table.page_size:,}: more than any request may have')

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> Work:
        """What the next step computes. Rows and pages for it are taken."""
        decode = self._keep_decoding()
        self._admit()
        return Work(self._chunks(), decode)

    def finish(self, request: Request) -> None:
        """It needs no more tokens, wherever it is now. Its row and pages are free."""
        if request.row < 0:
            self.waiting = deque(r for r in self.waiting if r is not request)
        else:
            self._leave(request)

    def fed(self, request: Request, n: int) -> None:
        """The cache holds n more of its tokens."""
        request.held += n
        if self.prefix and request.held // self.prefix.size > request.tip.depth:
            tokens = request.prompt + request.tokens
            request.tip = self.prefix.extend(request.row, request.tip, tokens)

    def preempt(self, request: Request) -> None:
        """A running request waits again, before all others, and will be computed anew."""
        self._leave(request)
        request.held = 0
        request.preempted += 1
        self.waiting.appendleft(request)

    def restart(self, requests: list[Request]) -> None:
        """After a fault midway: `requests`, which are all that have not ended, wait in their order,
        to be computed anew. The cache must have been reset."""
        for request in requests:
            request.preempted += request.row >= 0
            request.row, request.held, request.tip = -1, 0, None
        self.waiting, self.running = deque(sorted(requests, key=lambda r: r.number)), []

    def _keep_decoding(self) -> list[Request]:
        """All that decode, after pages for their next token were found for each: who came first is
        served first."""
        for request in sorted((r for r in self.running if r.decoding), key=lambda r: r.number):
            while request.row >= 0:
                missing = self.cache.table.missing([(request.row, request.held, request.length)])
                if missing <= self.cache.table.n_available:
                    self.cache.reserve(request.row, request.length)
                    break
                self.preempt(max(self.running, key=lambda r: r.number))
        return [r for r in self.running if r.decoding]

    def _admit(self) -> None:
        table = self.cache.table
        while self.waiting and len(self.running) < self.cache.batch_size:
            request = self.waiting[0]
            # one page more than it needs now, if those who run may need it: who has just come must
            # not stop them
            spare = any(table.pages_for(r.most) > len(table.rows[r.row]) for r in self.running)
            available, hit = table.n_available, None
            needed = table.pages_for(request.length) + spare
            # what is on disk has no page in the pool: it can be read when there is room
            if self.prefix:
                hit = self.prefix.match(request.prompt + request.tokens, disk=False)
                available, needed = self.prefix.n_available(hit.blocks), needed - hit.n_resident
            if available < needed:
                return
            if self.prefix:
                hit = self.prefix.match(request.prompt + request.tokens)
                if self._soon_more(request, len(hit.blocks) * self.prefix.size):
                    return
            self.waiting.popleft()
            request.row = len(self.running)
            self.running.append(request)
            if hit:
                request.tip = self.prefix.restore(request.row, hit)
                request.held = self.cache.held(request.row)
                request.stops = self.prefix.stops(hit, request.length)
                # else it was told before, and comes back after it had to leave
                if request.found < 0:
                    request.found = request.held
                    self.prefix.stats.count(request.length, request.held)
            self.cache.reserve(request.row, request.length)

    def _soon_more(self, request, found) -> bool:
        """Whether a request that runs is about to compute more of what this one begins with than
        there is now: such as that of another sample of the same prompt."""
        mine = request.prompt + request.tokens
        for other in self.running:
            its = other.prompt + other.tokens
            more = [stop for stop in other.stops if max(found, other.held) < stop < len(mine)]
            if any(its[:stop] == mine[:stop] for stop in more):
                return True
        return False

    def _chunks(self) -> list[list[tuple[Request, int]]]:
        """Prompts that fit are computed together, if they begin; else one chunk of one prompt a
        pass."""
        room, passes, together = self.prefill_chunk, [], []
        for request in sorted((r for r in self.running if not r.decoding), key=lambda r: r.number):
            if request.held or request.pending > self.prefill_chunk or request.stops:
                if room == 0:
                    break
                most = self._whole_pages(request, min(request.pending, room))
                pieces = self._pieces(request, most)
                passes += [[(request, n)] for n in pieces]
                room -= sum(pieces)
                continue
            widest = max([n for _, n in together] + [request.pending])
            before = sum(max(n for _, n in together) for _ in together)
            padded = widest * (len(together) + 1) - before
            if padded > room:
                break
            together.append((request, request.pending))
            room -= padded
        return passes + [together] * bool(together)

    def _whole_pages(self, request, n) -> int:
        """Of the next n tokens of a request with more to come: as many as end with a page, where
        the store can keep them."""
        if not self.prefix or n >= request.pending:
            return n
        end = (request.held + n) // self.prefix.size * self.prefix.size
        return end - request.held if end > request.held else n

    @staticmethod
    def _pieces(request, n) -> list[int]:
        """The next n tokens of a request, cut where chunks of it are to end."""
        last = request.held + n
        ends = [stop for stop in request.stops if request.held < stop < last] + [last]
        return [end - start for start, end in zip([request.held, *ends], ends)]

    def _leave(self, request: Request) -> None:
        row, last = request.row, self.running[-1]
        self.cache.reset([row])
        if self.prefix:
            self.prefix.release(request.tip)
            request.tip = None
        self.running[row] = last
        self.running.pop()
        if last is not request:
            self.cache.move(last.row, row)
            last.row = row
        request.row = -1
