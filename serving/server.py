"""The address, the event loop, and the way to an end: uvicorn around the application."""
import asyncio
import contextlib
import queue
import socket
import threading
import time

import uvicorn

from config.errors import UserError
from serving.worker import Worker

LAST = 5.0   # seconds after the grace that connections have, then they are cut
IDLE = 15.0  # seconds in which a connection without a request at work must get on: send one, or read what there is for it
MOST = 1000  # connections; more are answered with 503; lines of the log that wait


def bind(host: str, port: int) -> socket.socket:
    """A socket of that address, not yet listening: who connects now is refused, not kept waiting.

    Raises:
        UserError: it cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                                                flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # at once again after a stop
        sock.bind(address)
    except (OSError, OverflowError, UnicodeError) as e:
        raise UserError(f'host={host!r}, port={port}: cannot listen there: {e}') from e
    return sock


class RequestLog:
    """Prints lines on stdout from a thread of its own: a stuck output holds up no request.
    Lines that come while MOST of them wait are lost."""

    def __init__(self):
        self._lines = queue.Queue(MOST)
        self._thread = threading.Thread(target=self._run, name='request log', daemon=True)
        self._thread.start()

    def __call__(self, line: str) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(line)

    def close(self, timeout: float) -> None:
        """Print what is left, in at most `timeout` seconds (twice that, if the queue is full)."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=timeout)
            self._thread.join(timeout)

    def _run(self):
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError):  # the reader of stdout has gone
                print(line, flush=True)


class Server(uvicorn.Server):
    """Serves until SIGINT or SIGTERM (or `should_exit`): then nobody new is let in, who is there has `grace` seconds to be
    answered, and then is told that the server stops. A second Ctrl-C ends it at once.

    Args:
        app: the application of `serving.app`.
        worker: its worker, which has been started; it is drained and joined.
        grace: seconds.
        greeting: printed once it listens.
        request_log: closed at the end.
    """

    def __init__(self, app, worker: Worker, grace: float, greeting: str = '',
                 request_log: RequestLog | None = None):
        super().__init__(uvicorn.Config(
            app, http='h11', ws='none', log_level='warning', access_log=False, server_header=False, proxy_headers=False,
            lifespan='off', timeout_graceful_shutdown=max(1, round(grace + LAST)), limit_concurrency=MOST,
            callback_notify=self.cut_idle, timeout_notify=0))  # that is: every second
        self.worker, self.grace, self.greeting = worker, grace, greeting
        self.request_log = request_log
        self._stood = {}  # connection -> where it stood, and since when

    async def cut_idle(self) -> None:
        """End connections that have not got on for IDLE seconds while it was their turn. (uvicorn waits without end for the
        rest of a request's head, and for what is left of an answer to be read.)"""
        now, stands = time.monotonic(), {}
        for connection in list(self.server_state.connections):
            cycle, transport = connection.cycle, connection.transport
            if cycle is not None and not (cycle.response_complete or transport.is_closing()):
                continue  # at work: the request has time-outs of its own
            where = cycle, transport.get_write_buffer_size()
            before, since = self._stood.get(connection, (None, now))
            stands[connection] = where, since if where == before else now
            if now - stands[connection][1] > IDLE:
                transport.abort()
        self._stood = stands

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        if self.greeting:
            print(self.greeting, flush=True)

    async def shutdown(self, sockets=None) -> None:
        self.worker.drain(self.grace)
        await super().shutdown(sockets)
        end = time.monotonic() + LAST  # here: after this the signal may end the process
        while self.worker.running and not self.force_exit and (self.worker.saving or time.monotonic() < end):
            await asyncio.sleep(0.02)
        if self.request_log:
            self.request_log.close(1.0)
