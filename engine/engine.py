"""The batching engine: many requests in one paged cache; each joins and leaves when it is ready.

    engine = Engine(model, 16, max_seq_len=1024, kv_dtype='int8', tokenizer=tokenizer)
    for completion in engine.generate(['To be', 'Once more'], SamplingParams(seed=1)):
        print(completion.text)

    for event in engine.stream(prompts, params):          # as tokens come, of all requests
        print(event.index, event.text, event.completion)

What a request gets does not depend on others (up to the rounding of GEMMs of another batch size):
its random numbers come from its own seed; when pages run out it may wait, then goes on as before.
"""
import operator
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from config.errors import UserError
from engine.captured import CapturedDecode
from engine.decode import fast_decode
from engine.linear import speed_up_few_rows
from engine.paged import PAGE_SIZE, PagedKVCache
from engine.params import Completion, SamplingParams, TokenLogprob, shown
from engine.prefix import PrefixStore
from engine.prefix_disk import DiskTier, fingerprint
from engine.sampler import SampleRow, sample_rows
from engine.scheduler import Request, Scheduler
from engine.stopping import SampleText

PREFILL_CHUNK = 256
MANY_KEYS = 2304        # longer rows need no other kernels: `splits` in attention/kernels/decode.py
DISK_BUDGET = 10 ** 11  # bytes of a prefix_folder


@dataclass
class Event:
    """One token of a request, or its end. index: of the request, in the order of submission. token:
    -1 where there is none (an error, cancelled). text: the further text that is now certain.
    completion: only in the last event of a request."""
    index: int
    token: int
    text: str = ''
    logprob: TokenLogprob | None = None
    completion: Completion | None = None


class _Job:
    """What the engine knows of a request beside its place: clock, sampler, text."""

    def __init__(self, request: Request, tokenizer, now: float):
        self.request, self.tokenizer, self.submitted, self.first = request, tokenizer, now, None
        self.logprobs = [] if request.params.logprobs >= 0 else None
        self.num_emitted = 0  # tokens of which there has been an event
        self.restore()

    def restore(self) -> list[str]:
        """Sampler and text anew from the tokens, whatever interrupted; the text of each token."""
        params, tokens = self.request.params, self.request.tokens
        self.sampling = SampleRow(params, self.request.prompt + tokens, len(tokens))
        self.text = SampleText(self.tokenizer.stream(), params.stop) if self.tokenizer else None
        return [self._piece(token) for token in tokens]

    def _piece(self, token: int) -> str:
        is_text = self.text and token not in self.request.params.stop_tokens
        return self.text.add(token) if is_text else ''

    def take(self, token: int, logprob) -> str:
        """The token becomes part of the text; the piece of text that it makes certain."""
        if self.logprobs is not None:
            self.logprobs[len(self.request.tokens):] = [logprob]
        self.request.tokens.append(token)
        self.sampling.append(token)
        return self._piece(token)

    def ending(self) -> str:
        """'stop', 'length', or '' where the text goes on."""
        params, tokens = self.request.params, self.request.tokens
        if tokens and (tokens[-1] in params.stop_tokens or (self.text and self.text.stopped)):
            return 'stop'
        return 'length' if len(tokens) >= params.max_new_tokens else ''


class Engine:
    """Continuous batching over a fixed number of rows.

    Args:
        model: a GPT; it is put into eval mode.
        max_batch_size: rows: requests that run at once.
        max_seq_len: most positions of a request (prompt and generated); 0 = the model's block_size.
        kv_dtype: as in `model.new_cache`.
        kv_budget: bytes of KV memory for all; 0 = enough for every row at max_seq_len. Every row
            has rings for the local slots; the rest is pages of global slots, for who needs them.
        page_size: positions of a page.
        prefill_chunk: most prompt tokens that are computed between two decode steps.
        prefix_budget: bytes of host memory for what requests have computed (`engine.prefix`), which
            later ones that begin alike take over; 0 = every request computes its whole prompt.
        prefix_folder: also on disk: what leaves that memory, and at `close` all of it; '' = not.
        captured: on CUDA, capture decode steps as graphs and replay them (`engine.captured`).
        tokenizer: for texts: of prompts, in answers, and to stop at; None = token ids only.
    Raises:
        UserError: sizes below 1, a budget below rings and a page, what `new_cache` refuses.
    """

    def __init__(self, model, max_batch_size: int, max_seq_len: int = 0, kv_dtype: str = 'auto', *,
                 kv_budget: int = 0, page_size: int = PAGE_SIZE, prefill_chunk: int = PREFILL_CHUNK,
                 prefix_budget: int = 0, prefix_folder: str = '', tokenizer=None,
                 captured: bool = True, scheduler=Scheduler):
        if max_batch_size < 1 or max_seq_len < 0 or page_size < 1:
            raise UserError(f'max_batch_size={max_batch_size}, max_seq_len={max_seq_len}, '
                            f'page_size={page_size}: must be at least 1')
        self.model, self.tokenizer = model.eval(), tokenizer
        max_seq_len = max_seq_len or model.config.block_size
        n_pages = self._n_pages(max_batch_size, max_seq_len, kv_dtype, kv_budget, page_size)
        self.cache = model.new_cache(max_batch_size, max_seq_len, kv_dtype, PagedKVCache,
                                     n_pages=n_pages, page_size=page_size)
        self.prefix = self._prefix_store(prefix_budget, prefix_folder)
        self.scheduler = scheduler(self.cache, prefill_chunk, self.prefix)
        speed_up_few_rows(model)
        self.fast_decode = fast_decode(model, self.cache, captured)
        self.jobs: dict[int, _Job] = {}              # of requests that have not ended, by number
        self._undelivered: list[Event] = []          # the next step gives them
        self._failed_events: list[Event] | None = None        # of a step that failed, not recovered yet
        self._inboxes: dict[int, deque[Event]] = {}  # of requests a stream awaits, by number
        self._submitted, self.held_peak = 0, 0       # peak: most `PagedKVCache.held_nbytes` so far

    def _prefix_store(self, budget, folder):
        if budget < 0 or (folder and not budget):
            raise UserError(f'prefix_budget={budget}: bytes of host memory are needed' +
                            ', for a prefix_folder too' * bool(folder))
        if not budget:
            return None
        disk = None
        if folder:
            known_by = fingerprint(self.model, self.cache.kv_dtype, self.cache.table.page_size)
            disk = DiskTier(folder, known_by, DISK_BUDGET)
        return PrefixStore(self.cache, budget, disk=disk)

    def close(self) -> None:
        """What is kept of prefixes is on disk, if it is to be there."""
        if self.prefix:
            self.prefix.close()

    def _n_pages(self, rows, max_seq_len, kv_dtype, budget, page_size):
        plan, kv_dtype = self.model.plan, self.model.resolved_kv_dtype(kv_dtype)
        full, page = rows * -(-max_seq_len // page_size), plan.page_nbytes(page_size, kv_dtype)
        rings = plan.rings_nbytes(rows, max_seq_len, kv_dtype)
        if not budget:
            return full
        if budget < rings + page:
            raise UserError(f'kv_budget={budget:,} bytes: the windows of max_batch_size={rows} '
                            f'rows take {rings:,} and a page of {page_size} positions {page:,}: '
                            f'give at least {rings + page:,}, or fewer rows')
        return min(full, (budget - rings) // page) if page else full

    @torch.inference_mode()
    def prepare(self) -> None:
        """Compile the kernels and capture the decode steps of requests of any length, so that none
        waits for it: seconds, a minute the first time; nothing where steps are not captured.

        Raises:
            UserError: there are requests already.
        """
        if not isinstance(self.fast_decode, CapturedDecode):
            return
        if self.n_unfinished:
            raise UserError(f'prepare: {self.n_unfinished} requests have not ended')
        self.fast_decode.prepare()
        for row in range(min(2, self.cache.batch_size)):  # the second may be aligned less well
            for chunks in self._chunks_of_every_kind():
                try:
                    for n in chunks:
                        idx = torch.zeros(1, n, dtype=torch.int64, device=self.model.device)
                        self.model(idx, cache=self.cache, lens=[n], rows=[row])
                finally:
                    self.cache.reset()

    def _chunks_of_every_kind(self) -> list[list[int]]:
        """Sizes of chunks of a row for all kernels of prefill: each, behind few tokens and many; and
        of rows that begin with a chunk."""
        table, most = self.cache.table, self.scheduler.prefill_chunk
        room = min(self.cache.max_seq_len, table.n_pages * table.page_size)
        chunks, sizes = [], [1 << k for k in range(most.bit_length())]
        for n in [1, *sizes, *[most] * (MANY_KEYS // most), *sizes]:
            if sum(chunks) + n <= room:
                chunks.append(n)
        return [chunks, *([n] for n in {2, 15, 16, most - 1, most} if 1 < n <= min(most, room))]

    @property
    def n_unfinished(self) -> int:
        """Requests whose last event is still to come."""
        events = self._undelivered + (self._failed_events or [])
        return len(self.jobs) + sum(event.completion is not None for event in events)

    # -- requests ----------------------------------------------------------------------------------

    def submit(self, prompt: str | list[int], params: SamplingParams | None = None) -> int:
        """Queue a request; its index. One that can never run ends in an error at the next step."""
        index, params = self._submitted, params or SamplingParams()
        self._submitted += 1
        ids = []
        try:
            ids = self._ids(prompt)
            self._check(ids, params)
        except UserError as e:
            refused = Completion(ids, [], '', 'error', str(e), seconds=0.0)
            self._undelivered.append(Event(index, -1, completion=refused))
            return index
        request = Request(index, ids, params)
        self.jobs[index] = _Job(request, self.tokenizer, time.perf_counter())
        self.scheduler.add(request)
        return index

    def cancel(self, index: int) -> Event | None:
        """End a request. Its last event, which `step` or stream gives too; None if it has ended."""
        job = self.jobs.get(index)
        if job is None:
            return None
        try:
            self._end(job, 'cancelled', self._undelivered)
        except BaseException:
            self._failed_events = []  # the next step puts it right
            raise
        return self._undelivered[-1]

    def _ids(self, prompt):
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UserError('the prompt is text, and the engine has no tokenizer: '
                                'give token ids')
            return self.tokenizer.encode(prompt)
        try:
            tokens = prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt
            return [operator.index(token) for token in tokens]
        except TypeError:
            raise UserError(f'prompt={shown(prompt)}: must be a text or a list of token '
                            'ids') from None

    def _check(self, ids, params):
        vocab_size = self.model.config.vocab_size
        if not ids:
            raise UserError('the prompt has no tokens: give at least one')
        for what, tokens in (('the prompt has token', ids), ('stop token', params.stop_tokens)):
            wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise UserError(f'{what} {wrong}: the model has tokens 0 to {vocab_size - 1}')
        if params.stop and self.tokenizer is None:
            raise UserError(f'stop={params.stop!r}: stop texts need an engine with a tokenizer')
        self.scheduler.check(len(ids), params.max_new_tokens)

    # -- running them ------------------------------------------------------------------------------

    def generate(self, prompts, params=None,
                 on_event: Callable[[Event], None] | None = None) -> list[Completion]:
        """A completion for each of `prompts` (texts or lists of ids), in their order. params: one
        `SamplingParams` for all, or one for each. on_event: called with each event as it comes."""
        completions = {}
        with closing(self.stream(prompts, params)) as events:  # also when `on_event` fails
            for event in events:
                if on_event:
                    on_event(event)
                if event.completion:
                    completions[event.index] = event.completion
        return [completions[index] for index in sorted(completions)]

    def stream(self, prompts, params=None) -> Iterator[Event]:
        """The events of `prompts` as they come, with `index` counting from 0. Other requests go on
        beside them, unseen. Left early, what has not ended is cancelled."""
        prompts = list(prompts)
        params = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(params) != len(prompts):
            raise UserError(f'{len(params)} SamplingParams for {len(prompts)} prompts: '
                            'give one for all, or one for each')
        first, inbox, left = self._submitted, deque(), len(prompts)
        try:
            for prompt, p in zip(prompts, params):
                self._inboxes[self.submit(prompt, p)] = inbox
            while left:
                while not inbox:
                    self.step()
                event = inbox.popleft()
                left -= event.completion is not None
                yield replace(event, index=event.index - first)
        finally:
            for index in [index for index, its in self._inboxes.items() if its is inbox]:
                self.cancel(index)
                del self._inboxes[index]
            mine = range(first, first + len(prompts))
            self._undelivered = [event for event in self._undelivered if event.index not in mine]

    def step(self) -> list[Event]:
        """One step: chunks of prompts, then one token for each request that decodes; its events,
        but not those of a `stream`. Whatever interrupts it (Ctrl-C, no memory), no request is lost:
        the next step computes them anew, and what was drawn comes out of it."""
        events = []
        for event in self._step():
            self._inboxes.get(event.index, events).append(event)
        return events

    @torch.inference_mode()
    def _step(self) -> list[Event]:
        if self._failed_events is not None:  # an interruption of the recovery itself
            self._recover()
        events, self._undelivered = self._undelivered, []
        try:
            work = self.scheduler.schedule()
            self.held_peak = max(self.held_peak, self.cache.held_nbytes)
            for chunks in work.prefill:
                self._forward(chunks, [request.row for request, _ in chunks], events)
            decoding = [(request, 1) for request in work.decode if request.row >= 0]
            if decoding:
                self._decode(decoding, events)
        except BaseException:
            self._failed_events = events
            self._recover()
            raise
        return events

    def _recover(self) -> None:
        """After a fault in a step: what requests have drawn and the events so far make all anew."""
        events = self._failed_events
        self.cache.reset()  # it may have been left half-written
        if self.prefix:
            self.prefix.recover()
        for event in events:
            if event.completion:
                self.jobs.pop(event.index, None)
        self.scheduler.restart([job.request for job in self.jobs.values()])
        for job in list(self.jobs.values()):
            pieces, tokens = job.restore(), job.request.tokens
            for k in range(job.num_emitted, len(tokens)):  # drawn, and not yet told
                logprob, last = job.logprobs and job.logprobs[k], k == len(tokens) - 1
                self._emit(job, tokens[k], pieces[k], logprob, events, last)
        self._undelivered, self._failed_events = events + self._undelivered, None

    def _decode(self, decoding, events):
        """Rows that prefill in between take part without a token: so the rows are one slice."""
        by_row = {request.row: (request, n) for request, n in decoding}
        parts = [by_row.get(row, (None, 0)) for row in range(max(by_row) + 1)]
        if self.fast_decode is None:
            return self._forward(parts, list(range(len(parts))), events)
        ids = torch.tensor([request.next_tokens(1) if n else [0] for request, n in parts])
        ids = ids.to(self.model.device, non_blocking=True)
        self._draw(parts, self.fast_decode(ids, [n for _, n in parts]), events)

    def _forward(self, parts, rows, events) -> None:
        """parts: [(request or None, tokens)] for `rows`, which are appended to the cache."""
        width = max(n for _, n in parts)
        ids = [(request.next_tokens(n) if n else []) + [0] * (width - n) for request, n in parts]
        idx = torch.tensor(ids).to(self.model.device, non_blocking=True)
        logits = self.model(idx, cache=self.cache, lens=[n for _, n in parts], rows=rows)[0]
        self._draw(parts, logits[:, -1], events)

    def _draw(self, parts, logits, events) -> None:
        """The tokens of `parts` are in the cache; draws one for each request that lacks no more."""
        drawing = []
        for b, (request, n) in enumerate(parts):
            if n:
                self.scheduler.computed(request, n)
                if request.pending == 0:
                    drawing.append((b, self.jobs[request.number]))
        if not drawing:
            return
        if len(drawing) < len(parts):
            logits = logits[[b for b, _ in drawing]]
        drawn = sample_rows(logits, [job.sampling for _, job in drawing])
        # tolist() waits for the device
        for (_, job), token, logprob in zip(drawing, drawn.tokens.tolist(), drawn.logprobs):
            if token < 0:
                n, tip = len(job.request.tokens), job.request.last_block
                self._end(job, 'error', events,
                          f'the logits of token {n} are not finite (NaN or inf)')
                if self.prefix:  # nobody is to go on from there
                    self.prefix.forget(tip)
                continue
            job.first = job.first or time.perf_counter()
            self._emit(job, token, job.take(token, logprob), logprob, events)

    def _emit(self, job, token, text, logprob, events, last=True) -> None:
        """The event of a token that has been taken; with it a request may end."""
        if last and job.ending():
            return self._end(job, job.ending(), events, token=token, text=text, logprob=logprob)
        events.append(Event(job.request.number, token, text, logprob))
        job.num_emitted += 1

    def _end(self, job, reason, events, error='', token=-1, text='', logprob=None) -> None:
        request, seconds = job.request, time.perf_counter() - job.submitted
        if job.text:
            text += job.text.end()
        whole = job.text.text if job.text else ''
        done = Completion(request.prompt, request.tokens, whole, reason, error, job.logprobs,
                          job.first and job.first - job.submitted, seconds, max(0, request.num_cached_tokens))
        events.append(Event(request.number, token, text, logprob, done))
        self.jobs.pop(request.number, None)  # from here on it has ended, whatever interrupts
        self.scheduler.finish(request)
