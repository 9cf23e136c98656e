"""A server around a tiny random model: its application in this process, or with a socket of its own in a thread."""
import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from engine.dialogue import Template
from engine.engine import Engine
from serving.api import Service
from serving.app import Limits, make_app
from serving.metrics import Metrics
from serving.server import Server, bind
from serving.worker import Worker
from tests.helpers.serving import TOKENIZER, model_of

TURN = Template('{name}c{text}d')
LONGEST = 60  # positions of a request


def eventually(true, what='it', patience=60.0):
    """Wait until something is so that other threads do."""
    end = time.monotonic() + patience
    while not true():
        assert time.monotonic() < end, f'{what} did not come to be'
        time.sleep(0.005)


def assert_free(worker):
    """Nothing runs, waits or is held but what the prefix store may let go."""
    engine, table = worker.engine, worker.engine.cache.table
    eventually(lambda: not (worker._choices or worker._must_step or engine.n_unfinished
                            or worker._commands and worker.running), 'an idle worker')
    assert not engine.jobs and not engine.scheduler.running and not engine.scheduler.waiting and worker._num_open == 0
    assert table.n_free + table.n_evictable == table.n_pages
    assert all(block.users == 0 for block in engine.prefix.blocks) and engine.prefix.root.users == 0


def make_server(rows=3, max_waiting=8, keys=(), timeout=60.0, max_body=20_000, kind='full stack', **engine):
    engine = Engine(model_of(kind), rows, LONGEST, page_size=4, prefill_chunk=16, tokenizer=TOKENIZER,
                    **dict(prefix_budget=10 ** 6) | engine)
    worker = Worker(engine, max_waiting, Metrics())
    service = Service('tiny', TOKENIZER, LONGEST, 12, rows + max_waiting, TURN, 'a', 'b')
    worker.start()
    logged = []
    app = make_app(worker, service, Limits(max_body, timeout), keys, request_log=logged.append)
    return SimpleNamespace(worker=worker, engine=engine, app=app, metrics=worker.metrics,
                           service=service, logged=logged)


@pytest.fixture
def serve():
    """`serve(**settings)`: a server with `client`, a TestClient of its application."""
    made = []

    def make(**settings):
        server = make_server(**settings)
        server.client = TestClient(server.app, raise_server_exceptions=False)
        server.client.__enter__()
        made.append(server)
        return server
    yield make
    for server in made:
        server.worker.drain(0)
        server.worker.join(60)
        server.client.__exit__(None, None, None)
        assert not server.worker._thread.is_alive()


class Running:
    """A server at a port, in a thread."""

    def __init__(self, grace=5.0, **settings):
        self.__dict__.update(vars(make_server(**settings)))
        sock = bind('127.0.0.1', 0)
        self.port = sock.getsockname()[1]
        self.server = Server(self.app, self.worker, grace)
        self.thread = threading.Thread(target=self.server.run, args=([sock],))
        self.thread.start()
        eventually(lambda: self.server.started, 'the start')

    def stop(self):
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive() and not self.worker._thread.is_alive()


@pytest.fixture
def running():
    """`running(**settings)`"""
    made = []

    def make(**settings):
        made.append(Running(**settings))
        return made[-1]
    yield make
    for server in made:
        server.stop()


@pytest.fixture
def held(monkeypatch):
    """The engine's steps wait for `held.set()`; `held.in_step` says that one does."""
    gate, plain = threading.Event(), Engine.step
    gate.in_step = threading.Event()

    def step(engine):
        gate.in_step.set()
        assert gate.wait(60)
        return plain(engine)
    monkeypatch.setattr(Engine, 'step', step)
    yield gate
    gate.set()


class Asgi:
    """One request to an application without a client: what it sends, and a client that may leave."""

    def __init__(self, app, path, body: bytes, method='POST'):
        self.app, self.sent, self.gone = app, [], asyncio.Event()
        self.scope = dict(type='http', method=method, path=path, raw_path=path.encode(), query_string=b'', root_path='',
                          headers=[(b'content-type', b'application/json')], http_version='1.1', scheme='http',
                          server=('test', 80), client=('test', 1), asgi=dict(version='3.0', spec_version='2.3'))
        self.bodies = [body]

    async def receive(self):
        if self.bodies:
            return dict(type='http.request', body=self.bodies.pop(0), more_body=bool(self.bodies))
        await self.gone.wait()
        return dict(type='http.disconnect')

    async def send(self, message):
        self.sent.append(message)

    async def run(self):
        await self.app(self.scope, self.receive, self.send)

