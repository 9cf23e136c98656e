"""Run the application with uvicorn: the socket and the shutdown."""
import asyncio
import socket
import time

import uvicorn

from common.errors import UserError
from serving.worker import Worker

CLOSE_TIMEOUT = 5.0     # seconds from the end of the grace period to the end of the process
IDLE_TIMEOUT = 15       # seconds between two requests of a connection
MAX_CONNECTIONS = 1000  # additional ones get 503


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


class Server(uvicorn.Server):
    """Serves until SIGINT or SIGTERM (or `should_exit`). Then it accepts no new requests; running
    requests have `grace` seconds to finish, and fail with 503 after that. A second Ctrl-C stops the
    server immediately. worker: already started. greeting: printed once the server listens."""

    def __init__(self, app, worker: Worker, grace: float, greeting: str = ''):
        super().__init__(uvicorn.Config(
            app, http='h11', ws='none', log_level='warning', access_log=False,
            server_header=False, proxy_headers=False, lifespan='off',
            timeout_graceful_shutdown=max(1, round(grace + CLOSE_TIMEOUT)),
            limit_concurrency=MAX_CONNECTIONS, timeout_keep_alive=IDLE_TIMEOUT))
        self.worker, self.grace, self.greeting = worker, grace, greeting

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
