"""Run the application with uvicorn: the socket, idle connections, the log, shutdown."""
import asyncio
import contextlib
import queue
import socket
import threading
import time

import uvicorn

from config.errors import UserError
from serving.worker import Worker

CLOSE_TIMEOUT = 5.0     # seconds from the end of the grace period to the end of the process
IDLE_TIMEOUT = 15.0     # seconds that a client may make no progress outside of a running request
MAX_CONNECTIONS = 1000  # additional ones get 503
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


class RequestLog(threading.Thread):
    """Prints lines from a thread, so that a blocked stdout does not block requests."""

    def __init__(self):
        super().__init__(name='request log', daemon=True)
        self._lines = queue.Queue(MAX_LOG_LINES)
        self.start()

    def __call__(self, line: str) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(line)

    def close(self, timeout: float) -> None:
        """Print the remaining lines. timeout: seconds to queue the end mark, then to reach it."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=timeout)
            self.join(timeout)

    def run(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError):  # stdout is closed
                print(line, flush=True)


class Server(uvicorn.Server):
    """Serves until SIGINT or SIGTERM (or `should_exit`). Then it accepts no new requests; running
    requests have `grace` seconds to finish, and fail with 503 after that. A second Ctrl-C stops the
    server immediately. worker: already started. greeting: printed once the server listens."""

    def __init__(self, app, worker: Worker, grace: float, greeting: str = '',
                 request_log: RequestLog | None = None):
        super().__init__(uvicorn.Config(
            app, http='h11', ws='none', log_level='warning', access_log=False,
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
        while self.worker.is_alive() and not self.force_exit and time.monotonic() < end:
            await asyncio.sleep(0.02)
        if self.request_log:
            self.request_log.close(1.0)
