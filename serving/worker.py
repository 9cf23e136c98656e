"""One thread owns the engines: it gets commands from a queue and passes events to callbacks,
`deliver([(choice index, Event, RowView or ApiError), ...])`, which it calls itself."""
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.engine import Engine
from engine.requests.params import SamplingParams
from engine.requests.request import Event
from serving.api import ApiError

VIEW_INTERVAL = 0.05  # least seconds between two views of a choice's row, except the last
MANY_WATCHED = 8      # above it, the interval grows in proportion: 64 viewers must not slow others
MAX_FAILURES = 2  # consecutive failed steps, without a token in between, that a choice survives
log = logging.getLogger('nanokv.serving')


@dataclass(eq=False)
class Ticket:
    """An HTTP request."""
    asked: list[tuple[list[int], SamplingParams]]  # each choice's prompt and params
    deliver: Callable[[list], None]  # must not block
    watched: bool = False  # also deliver views of the choices' rows
    client: str = ''       # as in `Engine.submit`, like the next
    salt: bytes = b''
    engine: int = 0        # index of the worker's engine


@dataclass(eq=False)
class Choice:
    """A choice that has not ended. The engine runs each as a separate request."""
    engine: Engine
    number: int            # number of the engine's request
    ticket: Ticket
    index: int             # in the ticket
    num_failures: int = 0  # failed steps since the last token
    next_view: float = 0.0  # monotonic time before which no view is due


class Worker(threading.Thread):
    """The thread that runs engines, a step of each in turn. Nothing else may use them once it has
    started. (The engines of an elastic model's plans would only wait for each other in threads of
    their own.)

    max_waiting: choices that may wait, not counting those in the engine's rows; a client's, at most
    three quarters of that.
    """

    def __init__(self, engines: Sequence[Engine], max_waiting: int, metrics):
        super().__init__(name='engine', daemon=True)
        self.engines, self.metrics = engines, metrics
        rows = sum(engine.cache.batch_size for engine in engines)
        self.max_choices = rows + max_waiting
        self.max_client_choices = most_choices(rows, max_waiting)
        # guarded by the condition
        self._condition = threading.Condition()
        self._commands = []     # (method, ticket)
        self._num_open = Counter()  # choices that were submitted and have not ended, by client
        self._deadline = None   # monotonic time at which running choices fail; None = not draining
        # used only by the worker's thread
        self._choices: dict[tuple[Engine, int], Choice] = {}  # by engine and number
        self._must_step = set()  # engines that hold events of cancelled requests

    # -- from any thread -------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether it accepts requests."""
        return self.is_alive() and self._deadline is None

    def submit(self, ticket: Ticket) -> None:
        """Queue a request. ApiError: 429 if too many choices are waiting, of this client or of all;
        503 after `drain`."""
        with self._condition:
            self.check(ticket.client, len(ticket.asked))
            self._num_open[ticket.client] += len(ticket.asked)
            self._commands.append((self._begin, ticket))
            self._condition.notify()

    def check(self, client: str = '', num_choices: int = 1) -> None:
        """Raise the ApiError that `submit` would."""
        with self._condition:
            if self._deadline is not None:
                raise _stopping()
            whose = ''
            if self._num_open[client] + num_choices > self.max_client_choices:
                whose = ' of yours'
            if whose or self._num_open.total() + num_choices > self.max_choices:
                raise ApiError(429, f'too many requests{whose} wait: try again',
                               code='too_many_requests', headers={'Retry-After': '1'})

    def cancel(self, ticket: Ticket) -> None:
        """End the choices that are still open, before the engine's next step."""
        with self._condition:
            self._commands.append((self._cancel_all, ticket))
            self._condition.notify()

    def drain(self, grace: float) -> None:
        """Refuse new requests. After `grace` seconds the running ones fail."""
        with self._condition:
            if self._deadline is None:
                self._deadline = time.monotonic() + grace
            self._condition.notify()

    # -- on the worker's thread ------------------------------------------------------------------

    def run(self) -> None:
        try:
            device = self.engines[0].model.device
            if device.type == 'cuda':  # the current device is set per thread
                torch.cuda.set_device(device)
            while self._process_commands():
                at_work = {choice.engine for choice in self._choices.values()}
                for engine in self._must_step | at_work:
                    self._step(engine)
        finally:  # after a crash too: no client may wait forever
            with self._condition:
                self._deadline = self._deadline or 0.0
                commands, self._commands = self._commands, []
            for method, ticket in commands:
                if method == self._begin:
                    self._deliver(ticket, [(0, _stopping())])
            self._fail_running()

    def _process_commands(self) -> bool:
        """Sleep until there is work, then run the queued commands. Returns False at the end."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._commands or self._must_continue() or self._deadline is not None)
            commands, self._commands = self._commands, []
            deadline = self._deadline
        for method, ticket in commands:
            method(ticket)
        if deadline is not None and time.monotonic() >= deadline:
            self._fail_running()
        return self._must_continue() or deadline is None

    def _must_continue(self):
        return bool(self._choices or self._must_step)

    def _begin(self, ticket):
        engine = self.engines[ticket.engine]
        for index, (ids, params) in enumerate(ticket.asked):
            try:
                number = engine.submit(ids, params, ticket.client, ticket.salt)
            except Exception:
                log.exception('a request could not be queued')
                self._count_ended(ticket)
                self._deliver(ticket, [(index, ApiError(500, 'internal error'))])
            else:
                self._choices[engine, number] = Choice(engine, number, ticket, index)
                if ticket.watched:
                    engine.keep_view(number)

    def _cancel_all(self, ticket):
        for choice in [c for c in self._choices.values() if c.ticket is ticket]:
            self._cancel(choice)

    def _cancel(self, choice):
        """End the choice in the engine without notifying the client."""
        event = None
        self._must_step.add(choice.engine)
        try:
            event = choice.engine.cancel(choice.number)
        except Exception:
            log.exception('request %d could not be cancelled', choice.number)
        self._remove(choice, event)

    def _remove(self, choice, event):
        del self._choices[choice.engine, choice.number]
        choice.engine.views.pop(choice.number, None)
        self._count_ended(choice.ticket)
        if event and event.completion:
            self.metrics.ended(event.completion)

    def _count_ended(self, ticket):
        with self._condition:
            self._num_open -= Counter([ticket.client])  # without counts of zero

    def _fail_running(self):
        while self._choices:
            self._fail(next(iter(self._choices.values())), _stopping())

    def _fail(self, choice, error):
        self._cancel(choice)
        self._deliver(choice.ticket, [(choice.index, error)])

    def _deliver(self, ticket, items):
        try:
            ticket.deliver(items)
        except Exception:  # the client's event loop is closed
            self._cancel_all(ticket)

    def _step(self, engine):
        self._must_step.discard(engine)
        try:
            events = engine.step()
        except Exception:
            log.exception('an engine step failed; its requests start again')
            self.metrics.failed_steps.inc()
            for choice in [c for c in self._choices.values() if c.engine is engine]:
                choice.num_failures += 1
                if choice.num_failures > MAX_FAILURES:
                    self._fail(choice, ApiError(500, 'the model fails'))
            return
        deliveries = defaultdict(list)
        for event in events:
            choice = self._choices.get((engine, event.index))
            if choice:  # otherwise it was cancelled
                last = event.completion and engine.views.get(event.index)
                deliveries[choice.ticket].append((choice.index, self._process_event(choice, event)))
                if last:
                    deliveries[choice.ticket].append((choice.index, last))
        if engine.views:
            self._add_views(engine, deliveries)
        try:  # before delivery: a client may read the metrics as soon as it has its answer
            self.metrics.publish(self.engines, self._num_open.total())
        finally:
            for ticket, items in deliveries.items():
                self._deliver(ticket, items)

    def _add_views(self, engine, deliveries):
        """Add a view of each watched row for which one is due."""
        now = time.monotonic()
        interval = VIEW_INTERVAL * max(1.0, len(engine.views) / MANY_WATCHED)
        for number in engine.views:
            choice = self._choices[engine, number]
            view = engine.view(number) if now >= choice.next_view else None
            if view:
                choice.next_view = now + interval
                deliveries[choice.ticket].append((choice.index, view))

    def _process_event(self, choice, event: Event) -> Event | ApiError:
        """Update the metrics and the choice. Returns the event or error to deliver."""
        if event.token >= 0:
            self.metrics.tokens.inc()
            choice.num_failures = 0
        if event.completion is not None:
            self._remove(choice, event)
            if event.completion.finish_reason == 'error':
                return ApiError(500, event.completion.error)
        return event


def most_choices(rows: int, max_waiting: int) -> int:
    """How many choices of one client may run and wait: a quarter of the places is for others."""
    return rows + max_waiting - max_waiting // 4


def _stopping() -> ApiError:
    return ApiError(503, 'the server is stopping', headers={'Retry-After': '5'})
