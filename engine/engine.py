"""The batching engine: many requests share one paged cache, with continuous batching.

    engine = Engine(model, 16, max_seq_len=1024, kv_dtype='int8', tokenizer=tokenizer)
    for completion in engine.generate(['To be', 'Once more'], SamplingParams(seed=1)):
        print(completion.text)

A request's completion does not depend on other requests, up to GEMM rounding.
"""
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import torch

from common.errors import UserError
from engine.pages.cache import PAGE_SIZE, PagedKVCache
from engine.pages.page_table import pages_within
from engine.pages.view import RowView, view_of
from engine.prefix.store import PrefixStore
from engine.requests.flight import Flight
from engine.requests.params import Completion, SamplingParams, check_prompt, check_tokens
from engine.requests.request import Event, Request, prompt_ids
from engine.requests.sampler import Drawn, sample_rows
from engine.requests.scheduler import Scheduler, Work
from engine.steps.captured import CapturedDecode
from engine.steps.decode import fast_decode
from engine.steps.native import NativeDecode
from engine.weights.linear import speed_up_on_cpu
from kv.cache import on_device

PREFILL_CHUNK, PREFILL_ALONE = 256, 1024  # while rows decode, and while none does


class Engine:
    """Continuous batching over a fixed number of rows.

    Args:
        model: a GPT, which is put into eval mode.
        max_batch_size: number of rows, i.e. of requests that run at once.
        max_seq_len: maximum positions of a request, prompt included; 0 = the model's block_size.
        kv_dtype: as in `model.new_cache`.
        kv_budget: bytes of KV memory; 0 = enough for every row at max_seq_len. It covers the
            rings and states of all rows; the rest is for pages of the global slots.
        page_size: positions per page.
        prefill_chunk: maximum number of prompt tokens computed in a step; 0 = 256 while rows
            decode, and otherwise 1,024: longer chunks take less time per token.
        prefix_budget: bytes of host memory for the prefix cache (`engine.prefix.store`); 0 = none.
        captured: on CUDA, capture decode steps as graphs and replay them (`engine.steps.captured`).
        asynchronous: schedule a step before the tokens of the last one are read, so that events
            come one step later (`engine.requests.flight`); None = if decode steps are captured.
        tokenizer: for text prompts, completions and stop texts; None = token ids only.
    Raises UserError if a size is below 1, the budget too small, or a `new_cache` argument invalid.
    """

    def __init__(self, model, max_batch_size: int, max_seq_len: int = 0, kv_dtype: str = 'auto', *,
                 kv_budget: int = 0, page_size: int = PAGE_SIZE, prefill_chunk: int = 0,
                 prefix_budget: int = 0, tokenizer=None, captured: bool = True,
                 asynchronous: bool | None = None, scheduler=Scheduler):
        if max_batch_size < 1 or max_seq_len < 0 or page_size < 1:
            raise UserError(f'max_batch_size={max_batch_size}, max_seq_len={max_seq_len}, '
                            f'page_size={page_size}: must be at least 1')
        if prefix_budget < 0:
            raise UserError(f'prefix_budget={prefix_budget}: must be at least 0 bytes')
        self.model, self.tokenizer = model.eval(), tokenizer
        max_seq_len = max_seq_len or model.config.block_size
        n_pages = pages_within(kv_budget, model.plan, max_batch_size, max_seq_len, page_size,
                               model.resolved_kv_dtype(kv_dtype))
        self.cache = model.new_cache(max_batch_size, max_seq_len, kv_dtype, PagedKVCache,
                                     n_pages=n_pages, page_size=page_size)
        self.prefix = PrefixStore(self.cache, prefix_budget) if prefix_budget else None
        self.scheduler = scheduler(self.cache, prefill_chunk or PREFILL_CHUNK, self.prefix,
                                   prefill_chunk or PREFILL_ALONE)
        speed_up_on_cpu(model)
        self.fast_decode = fast_decode(model, self.cache, captured)
        self.cache.chunks_in_cpp = isinstance(self.fast_decode, NativeDecode)
        captures = isinstance(self.fast_decode, CapturedDecode)
        self.asynchronous = captures if asynchronous is None else asynchronous
        self._flight: Flight | None = None           # sampled tokens that were not read yet
        self.requests: dict[int, Request] = {}       # unfinished, by number
        self.views: dict[int, RowView | None] = {}   # the newest `view` of each in `keep_view`
        self._events: list[Event] = []               # to be returned by this step or the next
        self._failed = False                         # a step failed, and `_recover` is not done
        self._submitted = 0
        self.held_peak = 0                           # largest `PagedKVCache.held_nbytes` so far

    @property
    def n_unfinished(self) -> int:
        """Number of requests whose last event has not been returned yet."""
        return len(self.requests) + sum(event.completion is not None for event in self._events)

    def submit(self, prompt: str | list[int], params: SamplingParams | None = None,
               client: str = '', salt: bytes = b'') -> int:
        """Queue a request and return its index. An invalid request ends with an error event.

        client: waiting requests of different clients start in turn. salt: requests with different
        salts share nothing in the prefix cache."""
        index, params = self._submitted, params or SamplingParams()
        self._submitted += 1
        ids = []
        try:
            ids = prompt_ids(prompt, self.tokenizer)
            self._check(ids, params)
            request = Request(index, ids, params, client, salt, self.tokenizer)
            self.requests[index] = request
            self.scheduler.waiting.append(request)
        except UserError as e:
            refused = Completion(ids, [], '', 'error', str(e), seconds=0.0)
            self._events.append(Event(index, -1, completion=refused))
        return index

    def cancel(self, index: int) -> Event | None:
        """End a request. Returns its last event, which `step` also returns, or None if it has
        already ended (its last event may not have been returned yet)."""
        try:
            self._land(self._flight)  # it may end by the token that is in flight
            if index not in self.requests:
                return None
            self._end(self.requests[index], 'cancelled')
        except BaseException:
            self._failed = True  # the next step recovers
            raise
        return self._events[-1]

    def keep_view(self, index: int) -> None:
        """Keep a view of this request's row when it ends. The caller removes it from `views`."""
        self.views[index] = None

    def view(self, index: int, done: bool = False) -> RowView | None:
        """What the row of an unfinished request holds. None: it has not had a row yet."""
        self.views[index] = view_of(self.requests[index], self.scheduler, done)
        return self.views[index]

    def _check(self, ids, params):
        vocab_size = self.model.config.vocab_size
        check_prompt(ids, vocab_size)
        check_tokens('stop token', params.stop_tokens, vocab_size)
        if params.stop and self.tokenizer is None:
            raise UserError(f'stop={params.stop!r}: stop texts need an engine with a tokenizer')
        self.scheduler.check(len(ids), params.max_new_tokens)

    def generate(self, prompts, params=None,
                 on_event: Callable[[Event], None] | None = None) -> list[Completion]:
        """Return the completions of `prompts` (texts or lists of ids), in the same order.

        params: one `SamplingParams` for all, or one each. on_event: called with every event."""
        completions = {}
        with closing(self.stream(prompts, params)) as events:  # even if `on_event` fails
            for event in events:
                if on_event:
                    on_event(event)
                if event.completion:
                    completions[event.index] = event.completion
        return [completions[index] for index in sorted(completions)]

    def stream(self, prompts, params=None) -> Iterator[Event]:
        """Yield the events of `prompts` as they occur, with `index` counting from 0. Other requests
        keep running; `step` returns their events afterwards. Closing the iterator cancels the
        unfinished prompts."""
        prompts = list(prompts)
        params = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(params) != len(prompts):
            raise UserError(f'{len(params)} SamplingParams for {len(prompts)} prompts: '
                            'give one for all, or one for each')
        first, left = self._submitted, len(prompts)
        mine = range(first, first + left)
        try:
            for prompt, p in zip(prompts, params):
                self.submit(prompt, p)
            while left:
                events = self.step()
                self._events[:0] = [event for event in events if event.index not in mine]
                for event in events:
                    if event.index in mine:
                        if event.completion:
                            left -= 1
                        yield replace(event, index=event.index - first)
        finally:
            for index in mine:
                self.cancel(index)
            self._events = [event for event in self._events if event.index not in mine]

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Run one step: prompt chunks, then one token for each decoding request. Returns its
        events. After an exception (Ctrl-C, out of memory) no request or sampled token is lost: the
        next step recomputes the cache and returns the pending events."""
        if self._failed:  # the recovery was interrupted
            self._recover()
        try:
            work = self._schedule()
            sampled = self._run(work)
            self._finish(work, sampled)
        except BaseException:
            self._failed = True
            self._recover()
            raise
        events, self._events = self._events, []
        return events

    def _recover(self) -> None:
        """After a failed step: rebuild all state from the sampled tokens and the events."""
        self._flight = None
        self.cache.reset()  # it may be half-written
        if self.prefix:
            self.prefix.recover()
        for event in self._events:
            if event.completion:
                self.requests.pop(event.index, None)
        self.scheduler.restart(list(self.requests.values()))
        for request in list(self.requests.values()):
            texts, tokens, logprobs = request.restore(), request.tokens, request.logprobs
            for k in range(request.num_emitted, len(tokens)):  # sampled but not emitted yet
                logprob = logprobs[k] if logprobs else None
                self._emit(request, tokens[k], texts[k], logprob, last=k == len(tokens) - 1)
        self._failed = False

    def _schedule(self) -> Work:
        flight = self._flight
        if flight and (flight.penalised or self.scheduler.may_preempt()):
            self._land(self._flight)  # a request that starts again must know its tokens
        work = self.scheduler.schedule()
        self.held_peak = max(self.held_peak, self.cache.held_nbytes)
        return work

    def _run(self, work: Work) -> list[tuple[list[Request], Drawn]]:
        """Compute the work, and sample a token for each request whose tokens are all in the cache
        then. Returns for each forward pass these requests and what was drawn. Below, `parts` are
        [(request, number of tokens)]."""
        if self._in_cpp(work.prefill, work.decode):
            sampled = [self._extend(work.parts)]
        else:
            sampled = [self._prefill(parts) for parts in passes(work.prefill)]
            if work.decode:
                sampled.append(self._decode(work.decode))
        return [(requests, drawn) for requests, drawn in sampled if requests]

    def _in_cpp(self, chunks, decoding) -> bool:
        """Whether the C++ step computes prompts and decoding rows together, which reads the weights
        once (Sarathi, Agrawal et al. 2023). Without such rows torch may be faster."""
        if self.asynchronous or not chunks or not isinstance(self.fast_decode, NativeDecode):
            return False
        return decoding or sum(n for _, n in chunks) <= self.fast_decode.most_tokens

    def _extend(self, parts):
        logits = self.fast_decode.extend([request.next_tokens(n) for request, n in parts],
                                         [request.row for request, _ in parts],
                                         [request.pending == n for request, n in parts])
        return self._sample(parts, logits)

    def _prefill(self, parts):
        if self._in_cpp(parts, []):
            return self._extend(parts)
        return self._sample(parts, self._forward(parts, [request.row for request, _ in parts]))

    def _decode(self, decoding):
        # prefilling rows in between are included with 0 tokens, so that the rows form one slice
        by_row = {request.row: (request, 1) for request in decoding}
        parts = [by_row.get(row, (None, 0)) for row in range(max(by_row) + 1)]
        if self.fast_decode is None:
            return self._sample(parts, self._forward(parts, list(range(len(parts)))))
        logits = self.fast_decode(self._ids_of(parts), [n for _, n in parts])
        return self._sample(parts, logits, getattr(self.fast_decode, 'sample_rows', None))

    def _forward(self, parts, rows) -> torch.Tensor:
        """(len(parts), V) logits after the last token of each."""
        lens = [n for _, n in parts]
        return self.model(self._ids_of(parts), cache=self.cache, lens=lens, rows=rows)[0][:, -1]

    def _ids_of(self, parts) -> torch.Tensor:
        """(len(parts), t) token ids on the device, those in flight included."""
        width, requests = max(n for _, n in parts), [request for request, _ in parts]
        if self._flight and self._flight.requests == requests:  # most decode steps
            return self._flight.next_ids()
        ids = [request.next_tokens(n) if n else [] for request, n in parts]
        idx = on_device([row + [0] * (width - len(row)) for row in ids], self.model.device)
        if self._flight:
            self._flight.fill(idx, requests)
        return idx

    def _sample(self, parts, logits, sample=None) -> tuple[list[Request], Drawn]:
        """logits: of all parts, or only of those that are sampled. sample: instead of
        `sample_rows`."""
        rows = [b for b, (request, n) in enumerate(parts) if n and request.pending == n]
        requests = [parts[b][0] for b in rows]
        return requests, (sample or sample_rows)(logits, requests, rows) if rows else None

    def _finish(self, work: Work, sampled) -> None:
        """Count what was computed, and emit tokens: of this step, or if the engine is asynchronous
        those of the last one, while the device computes this one."""
        flight = Flight(sampled) if sampled else None
        if self.asynchronous:
            flight, self._flight = self._flight, flight
        self._land(flight, work.parts)
        if self._flight:
            for request in self._flight.requests:
                request.in_flight = 1

    def _land(self, flight: Flight | None, parts=()) -> None:
        """Append the tokens of a flight to their requests, then count these parts as computed (the
        prefix cache needs the tokens), then emit (a request that ends frees its row)."""
        if flight is self._flight:
            self._flight = None
        landed, failed = [], []
        for request, token, logprob in flight.read() if flight else ():
            if request.number not in self.requests:  # it has ended
                continue
            if token < 0:
                failed.append(request)
            else:
                landed.append((request, token, request.take(token, logprob), logprob))
        for request, n in parts:
            if request not in failed:
                self.scheduler.computed(request, n)
        for request, *sampled in landed:
            if request.first_token is None:
                request.first_token = time.perf_counter()
            self._emit(request, *sampled)
        for request in failed:
            n, last_block = len(request.tokens), request.last_block
            self._end(request, 'error', f'the logits of token {n} are not finite (NaN or inf)')
            if self.prefix:  # no request may reuse its blocks
                self.prefix.forget(last_block)

    def _emit(self, request, token, text, logprob, last=True) -> None:
        """Emit the event of a token, which may end the request."""
        reason = request.ending() if last else ''
        if reason:
            self._end(request, reason, token=token, text=text, logprob=logprob)
        else:
            self._events.append(Event(request.number, token, text, logprob))
            request.num_emitted += 1

    def _end(self, request, reason, error='', token=-1, text='', logprob=None) -> None:
        whole, ttft_s = '', None
        if request.number in self.views:
            self.view(request.number, done=True)
        if request.text:
            text += request.text.end()
            whole = request.text.text
        if request.first_token is not None:
            ttft_s = request.first_token - request.submitted
        done = Completion(request.prompt, request.tokens, whole, reason, error, request.logprobs,
                          ttft_s, time.perf_counter() - request.submitted,
                          max(0, request.num_cached_tokens))
        self._events.append(Event(request.number, token, text, logprob, done))
        self.requests.pop(request.number, None)  # it counts as ended even if the next line fails
        self.scheduler.finish(request, reusable=reason != 'error')


def passes(chunks: list[tuple[Request, int]]) -> list[list[tuple[Request, int]]]:
    """Forward passes over these chunks: one, padded, unless most of it would be padding."""
    padded = len(chunks) * max((n for _, n in chunks), default=0)
    if padded <= 2 * sum(n for _, n in chunks):
        return [chunks] if chunks else []
    return [[chunk] for chunk in chunks]
