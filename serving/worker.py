"""One thread owns the engine: requests go in by a queue, events come out by callbacks.

    worker = Worker(engine, max_waiting=64, metrics=Metrics())
    worker.start()
    ticket = worker.submit([(ids, params)], deliver)     # any thread; deliver([(choice, Event or Fault)]) on the engine's
    worker.cancel(ticket)                                # any thread; nothing more is delivered soon after
    worker.drain(10.0); worker.join()
"""
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from engine.engine import Event
from engine.params import SamplingParams

RETRIES = 2  # times that a request may be in a step that fails, without a token in between, before it is given up
log = logging.getLogger('nanokv.serving')


class Busy(Exception):
    """As many requests as may wait are waiting."""


class Stopping(Exception):
    """The server takes no more requests."""


@dataclass(frozen=True)
class Fault:
    """A request that ended without an answer. status: 400 what was asked cannot be done, 500 our fault, 503 stopping."""
    status: int
    message: str


@dataclass(eq=False)
class Ticket:
    """One request over HTTP: what it asks of the engine, one (token ids, params) a choice.

    open: choices without an end, by their number in the engine; only the worker's thread changes it. submitted: seconds of
    `time.perf_counter`.
    """
    asked: list[tuple[list[int], SamplingParams]]
    deliver: Callable[[list], None]
    submitted: float = field(default_factory=time.perf_counter)
    open: dict[int, int] = field(default_factory=dict)
    cancelled: bool = False


class Worker:
    """The thread around an engine, which nothing else may touch once it has started.

    saving: no request runs any more, and what they have computed goes to disk, which may take a while.

    Args:
        engine: an `engine.engine.Engine`; it is closed at the end.
        max_waiting: requests of the engine that may be there beside those for which it has rows.
        metrics: a `serving.metrics.Metrics`, told what happens.
    """

    def __init__(self, engine, max_waiting: int, metrics):
        self.engine, self.metrics, self.most = engine, metrics, engine.cache.batch_size + max_waiting
        self._wake, self._inbox, self._n_open, self._deadline = threading.Condition(), [], 0, None
        self._owners: dict[int, Ticket] = {}   # by the number of each request that has not ended
        self._refused, self._strikes, self._first = set(), {}, set()
        self._ended = self.saving = False
        self._stale = False                    # the engine has events of requests that are nobody's any more
        self._thread = threading.Thread(target=self._run, name='engine', daemon=True)

    # -- from any thread ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return self._thread.is_alive() and self._deadline is None

    @property
    def running(self) -> bool:
        """Whether its thread has not ended."""
        return self._thread.is_alive()

    def submit(self, asked: list[tuple[list[int], SamplingParams]], deliver: Callable[[list], None]) -> Ticket:
        """Queue a request with its choices. `deliver` is called on the worker's thread, and must not block.

        Raises:
            Busy: there are `max_waiting` already. Stopping: after `drain`.
        """
        ticket = Ticket(asked, deliver)
        with self._wake:
            self._check(len(asked))
            self._n_open += len(asked)
            self._inbox.append((self._begin, ticket))
            self._wake.notify()
        return ticket

    def check(self) -> None:
        """Raises Busy or Stopping where a request, however small, would not be taken now."""
        with self._wake:
            self._check(1)

    def _check(self, n):
        if self._deadline is not None:
            raise Stopping
        if self._n_open + n > self.most:
            raise Busy

    def cancel(self, ticket: Ticket) -> None:
        """End what has not ended of it; what it held is free before the engine's next step."""
        with self._wake:
            ticket.cancelled = True  # before it has begun: then it never does
            if not self._ended:
                self._inbox.append((self._drop, ticket))
                self._wake.notify()

    def drain(self, grace: float) -> None:
        """Take no more requests; after `grace` seconds those that still run are ended."""
        with self._wake:
            if self._deadline is None:
                self._deadline = time.monotonic() + grace
            self._wake.notify()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end, after `drain`."""
        self._thread.join(timeout)

    # -- on the worker's thread ---------------------------------------------------------------------------------------

    def _run(self):
        try:
            if self.engine.model.device.type == 'cuda':  # each thread has a current device of its own
                torch.cuda.set_device(self.engine.model.device)
            while self._obey():
                self._step()
        finally:  # also when it dies: nobody must wait for it for ever
            try:
                self._refuse_all()
            finally:
                self.saving = True
                self._close()

    def _refuse_all(self):
        with self._wake:
            self._ended, self._deadline = True, self._deadline or 0.0
            left, self._inbox = self._inbox, []
        for act, ticket in left:
            if act == self._begin:
                self._hand(ticket, [(0, Fault(503, 'the server is stopping'))])
        self._end_all(self._owners)

    def _close(self):
        try:
            self.engine.close()
        except Exception:
            log.exception('what earlier requests have computed could not be kept')

    def _obey(self) -> bool:
        """Do what was asked for; sleeps while there is nothing to do. Whether to go on."""
        with self._wake:
            while not (self._inbox or self._owners or self._stale or self._deadline is not None):
                self._wake.wait()
            orders, self._inbox, deadline = self._inbox, [], self._deadline
        for act, ticket in orders:
            act(ticket)
        if deadline is not None and time.monotonic() >= deadline:
            self._end_all(self._owners)
        return bool(self._owners or self._stale or deadline is None)

    def _begin(self, ticket):
        if ticket.cancelled:
            return self._closed(len(ticket.asked))
        for choice, (ids, params) in enumerate(ticket.asked):
            try:
                number = self.engine.submit(ids, params)
            except Exception:
                log.exception('a request could not be queued')
                self._closed(1)
                self._hand(ticket, [(choice, Fault(500, 'internal error'))])
                continue
            ticket.open[number] = choice
            self._owners[number] = ticket
            if number not in self.engine.jobs:
                self._refused.add(number)  # the next step says why

    def _drop(self, ticket):
        for number in list(ticket.open):
            self._cancel(number)

    def _cancel(self, number):
        """End one in the engine, quietly."""
        try:
            event = self.engine.cancel(number)
        except Exception:
            log.exception('request %d could not be cancelled', number)
            event = None
        self._stale = True
        self._forget(number, event)

    def _forget(self, number, event=None):
        ticket = self._owners.pop(number)
        del ticket.open[number]
        self._refused.discard(number)
        self._first.discard(number)
        self._strikes.pop(number, None)
        self._closed(1)
        if event and event.completion:
            self.metrics.ended(event.completion, time.perf_counter() - ticket.submitted)

    def _closed(self, n):
        with self._wake:
            self._n_open -= n

    def _end_all(self, numbers):
        for number in list(numbers):
            if number in self._owners:  # a client that cannot be told takes its other choices with it
                self._fail(number, Fault(503, 'the server is stopping'))

    def _fail(self, number, fault):
        ticket = self._owners[number]
        choice = ticket.open[number]
        self._cancel(number)
        self._hand(ticket, [(choice, fault)])

    def _hand(self, ticket, items):
        try:
            ticket.deliver(items)
        except Exception:  # its event loop has ended
            self._drop(ticket)

    def _step(self):
        before = {number: job.request.preempted for number, job in self.engine.jobs.items()}
        self._stale = False
        try:
            events = self.engine.step()
        except Exception:
            log.exception('a step of the engine failed; what it was at is computed anew')
            self.metrics.failed_steps.inc()
            return self._blame(before)
        items: dict[Ticket, list] = {}
        for event in events:
            ticket = self._owners.get(event.index)
            if ticket is not None:  # else it was cancelled
                items.setdefault(ticket, []).append((ticket.open[event.index], self._seen(ticket, event)))
        try:
            self.metrics.publish(self.engine, self._n_open)  # first: who has an answer may look at once
        finally:
            for ticket, its in items.items():
                self._hand(ticket, its)

    def _seen(self, ticket, event: Event) -> Event | Fault:
        """Count it; what its owner is told."""
        number, completion = event.index, event.completion
        if event.token >= 0:
            self.metrics.tokens.inc()
            self._strikes.pop(number, None)
            if number not in self._first:
                self._first.add(number)
                self.metrics.ttft.observe(time.perf_counter() - ticket.submitted)
        if completion is None:
            return event
        refused = number in self._refused
        self._forget(number, event)
        if completion.finish_reason == 'error':
            return Fault(400 if refused else 500, completion.error)
        return event

    def _blame(self, before):
        """After a step that failed: the engine starts all again that ran, and nothing is lost. What fails again and again
        without a token in between is ended, the newest first, until the others get on."""
        jobs = self.engine.jobs
        ran = [n for n in self._owners if n not in jobs or jobs[n].request.preempted > before.get(n, 0)] or list(self._owners)
        for number in ran:
            self._strikes[number] = self._strikes.get(number, 0) + 1
        suspects = [number for number in ran if self._strikes[number] > RETRIES]
        if suspects:
            self._fail(max(suspects), Fault(500, 'the model failed on this request'))
