"""Run the application with uvicorn: the socket, idle connections, shutdown."""
import asyncio
import contextlib
import queue
import socket
import threading
import time
from collections import Counter

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from config.errors import UserError
from config.terminal import visible
from serving.worker import Worker

CLOSE_TIMEOUT = 5.0     # seconds from the end of the grace period to the end of the process
IDLE_TIMEOUT = 15.0     # seconds that a client may make no progress outside of a running request
MAX_CONNECTIONS = 1000  # additional ones get 503
MAX_OF_ADDRESS = 200    # of these; a proxy counts as one address
MAX_LOG_LINES = 1000    # waiting for stdout; additional lines are dropped


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket. It does not listen yet, so connections are refused, not delayed.
    UserError: if the address is invalid or in use."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                                                flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # restart without a wait
        sock.bind(address)
    except (OSError, OverflowError, UnicodeError) as e:
        raise UserError(f'host={host!r}, port={port}: cannot listen there: {e}') from e
    return sock


class RequestLog:
    """Prints lines from a thread, so that a blocked stdout does not block requests."""

    def __init__(self):
        self._lines = queue.Queue(MAX_LOG_LINES)
        self._thread = threading.Thread(target=self._run, name='request log', daemon=True)
        self._thread.start()

    def __call__(self, line: str) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(line)

    def close(self, timeout: float) -> None:
        """Print the remaining lines. timeout: seconds to queue the end mark, then to reach it."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=timeout)
            self._thread.join(timeout)

    def _run(self):
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError):  # stdout is closed
                print(visible(line), flush=True)


class Connection(H11Protocol):
    """A connection. If there are MAX_CONNECTIONS, or more than MAX_OF_ADDRESS of its address, an
    idle one is closed, so that idle connections do not keep others out: the oldest one of the
    address that has the most."""

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.began = time.monotonic()
        self.address = self.client and self.client[0]
        alive = [each for each in self.connections if not each.transport.is_closing()]
        counts = Counter(each.address for each in alive)
        is_full = len(alive) >= MAX_CONNECTIONS
        if not is_full and counts[self.address] <= MAX_OF_ADDRESS:
            return
        idle = [each for each in alive if is_full or each.address == self.address]
        idle = [each for each in idle if each.cycle is None or each.cycle.response_complete]
        min(idle, key=lambda each: (-counts[each.address], each.began)).transport.abort()


class Server(uvicorn.Server):
    """Serves until SIGINT or SIGTERM (or `should_exit`). Then it accepts no new requests; running
    requests have `grace` seconds to finish, and fail with 503 after that. A second Ctrl-C stops the
    server immediately. worker: already started. greeting: printed once the server listens."""

    def __init__(self, app, worker: Worker, grace: float, greeting: str = '',
                 request_log: RequestLog | None = None):
        super().__init__(uvicorn.Config(
            app, http=Connection, ws='none', log_level='warning', access_log=False,
            server_header=False, proxy_headers=False, lifespan='off',
            timeout_graceful_shutdown=max(1, round(grace + CLOSE_TIMEOUT)),
            limit_concurrency=MAX_CONNECTIONS,
            callback_notify=self.cut_idle, timeout_notify=0))  # 0: every second
        self.worker, self.grace, self.greeting = worker, grace, greeting
        self.request_log = request_log
        self._progress = {}  # connection -> (cycle, bytes unsent), time of the last change

    async def cut_idle(self) -> None:
        """Close connections on which the client made no progress for IDLE_TIMEOUT. uvicorn has no
        timeout for receiving request headers or for a client that does not read the response."""
        now, progress = time.monotonic(), {}
        for connection in list(self.server_state.connections):
            cycle, transport = connection.cycle, connection.transport
            if cycle is not None and not (cycle.response_complete or transport.is_closing()):
                continue  # a running request has its own timeout
            state = cycle, transport.get_write_buffer_size()
            before, since = self._progress.get(connection, (None, now))
            since = since if state == before else now
            progress[connection] = state, since
            if now - since > IDLE_TIMEOUT:
                transport.abort()
        self._progress = progress

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        if self.greeting:
            print(self.greeting, flush=True)

    async def shutdown(self, sockets=None) -> None:
        self.worker.drain(self.grace)
        await super().shutdown(sockets)
        end = time.monotonic() + CLOSE_TIMEOUT  # the process may end when this method returns
        while self.worker.is_alive() and not self.force_exit:
            if not self.worker.saving and time.monotonic() >= end:
                break
            await asyncio.sleep(0.02)
        if self.request_log:
            self.request_log.close(1.0)
