"""A server for a tiny random model: its application in this process, or a thread with a port."""
import functools
import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from data.tokenizer import CharTokenizer
from engine.text.dialogue import Template
from engine.engine import Engine
from engine.requests.params import SamplingParams
from serving.api import Service
from serving.app import make_app
from serving.metrics import Metrics
from serving.server import Server, bind
from serving.worker import Worker
from tests.helpers.serving import TOKENIZER, alone, model_of
from tests.serving.browser import ALPHABET, answering

TURN = Template('{name}c{text}d')
LONGEST = 60  # maximum positions of a request
COMPLETIONS, CHAT = '/v1/completions', '/v1/chat/completions'
MODEL = model_of('full stack')
USER = {'role': 'user', 'content': 'jab'}


def eventually(condition):
    """Wait until other threads make the condition true."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, 'timed out'
        time.sleep(0.005)


def in_background(call):
    """Call it in a new thread. Returns the Future of its value."""
    return ThreadPoolExecutor(1).submit(call)


@functools.cache
def expected(text, n=12, **params):
    """The completion from an engine that runs nothing else."""
    return alone(MODEL, text, SamplingParams(n, **params), tokenizer=TOKENIZER)


def assert_refused(response, status, *named, param=Ellipsis, code=Ellipsis):
    error = response.json()['error']
    assert response.status_code == status, response.text
    assert set(error) == {'message', 'type', 'param', 'code'}
    assert all(text in error['message'] for text in named) and '\n' not in error['message'], error
    assert param in (Ellipsis, error['param']) and code in (Ellipsis, error['code']), error


def assert_free(worker, engine=None):
    """Check that nothing runs or waits, and only evictable pages of the prefix cache are in use."""
    engine = engine or worker.engines[0]
    table = engine.cache.table
    eventually(lambda: not (worker._choices or worker._must_step or engine.n_unfinished
                            or worker._commands and worker.is_alive()))
    scheduler = engine.scheduler
    assert not engine.requests and not scheduler.running and not scheduler.waiting
    assert worker._num_open.total() == 0 and not engine.views
    assert table.n_free + table.n_evictable == table.n_pages
    blocks = [*engine.prefix.blocks, *engine.prefix.roots.values()] if engine.prefix else []
    assert not any(block.users for block in blocks)


class InProcess:
    """An application and its started worker. logged: lines of the request log. plans: {name:
    (model, fields of its Service)} of others that it serves."""

    def __init__(self, rows=3, max_waiting=8, keys=(), timeout=60.0, max_body=20_000, page=True,
                 model=MODEL, tokenizer=None, cors='', shared_prefix=False, plans=None, **settings):
        tokenizer = tokenizer or TOKENIZER  # a test may replace it
        settings = dict(prefix_budget=10 ** 6) | settings
        plans = plans or {}
        self.engines = [Engine(each, rows, LONGEST, page_size=4, prefill_chunk=16,
                               tokenizer=tokenizer, **settings)
                        for each in (model, *(each for each, _ in plans.values()))]
        self.engine = self.engines[0]
        self.metrics, self.logged = Metrics(), []
        self.worker = Worker(self.engines, max_waiting, self.metrics)
        self.service = Service('tiny', tokenizer, model.config.vocab_size, LONGEST, 12,
                               rows + max_waiting, TURN, 'a', 'b', max_body, timeout)
        services = [self.service, *(replace(self.service, model=name, engine=i, **fields) for i, (
            name, (_, fields)) in enumerate(plans.items(), 1))]
        self.worker.start()
        self.app = make_app(self.worker, services, keys, self.logged.append, page, cors,
                            shared_prefix)
        self.client = TestClient(self.app, raise_server_exceptions=False)
        self.client.__enter__()

    def stop(self):
        self.worker.drain(0)
        self.worker.join(60)
        self.client.__exit__(None, None, None)
        assert not self.worker.is_alive()

    def complete(self, **fields):
        return self.post(COMPLETIONS, dict(prompt='abc') | fields)

    def chat(self, *messages, **fields):
        return self.post(CHAT, dict(messages=messages) | fields)

    def post(self, path, document):
        # the client's own `json` refuses half a surrogate pair
        headers = {'content-type': 'application/json'}
        return self.client.post(path, content=json.dumps(document), headers=headers)

    def text(self, **fields):
        return self.complete(**fields).json()['choices'][0]['text']

    def wait_for(self, n):
        """Wait until n choices are open: asked for, and not ended."""
        eventually(lambda: self.worker._num_open.total() == n)

    def metric(self, name, **labels):
        return self.metrics.registry.get_sample_value('nanokv_' + name, labels)

    def set_service(self, **values):
        for name, value in values.items():
            object.__setattr__(self.service, name, value)


class Running(InProcess):
    """A server on a port, in a thread."""

    def __init__(self, grace=5.0, **settings):
        super().__init__(**settings)
        sock = bind('127.0.0.1', 0)
        self.port = sock.getsockname()[1]
        self.server = Server(self.app, self.worker, grace)
        self.thread = threading.Thread(target=self.server.run, args=([sock],))
        self.thread.start()
        eventually(lambda: self.server.started)

    def stop(self):
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive() and not self.worker.is_alive()
        super().stop()


def started(kind):
    """A fixture: `serve(**settings)` starts a server, which is stopped at the end of the test."""
    @pytest.fixture
    def start():
        made = []
        yield lambda **settings: made.append(kind(**settings)) or made[-1]
        for server in made:
            server.stop()
    return start


serve, running = started(InProcess), started(Running)


@pytest.fixture
def held(monkeypatch):
    """Steps of the engine wait: `held.release(n)` lets n of them run, `held.set()` all.
    `held.in_step` is set once one waits."""
    gate, plain = threading.Semaphore(0), Engine.step
    gate.in_step, gate.set = threading.Event(), lambda: gate.release(10 ** 6)

    def step(engine):
        gate.in_step.set()
        assert gate.acquire(timeout=60)
        return plain(engine)
    monkeypatch.setattr(Engine, 'step', step)
    yield gate
    gate.set()


@pytest.fixture(scope='module')
def chromium():
    from playwright.sync_api import sync_playwright
    path = os.environ.get('CHROMIUM') or shutil.which('chromium')
    assert path, 'Chromium is needed: install it, or set CHROMIUM to the path of its program'
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path,
                                         args=['--no-sandbox', '--disable-gpu'])


@pytest.fixture
def markup_server(running, monkeypatch):
    """`markup_server(**settings)`: a server whose tokens can write markup, and which sends a cache
    event at each step. A line is a turn."""
    assert len(ALPHABET) == MODEL.config.vocab_size
    tokenizer = CharTokenizer({c: i for i, c in enumerate(ALPHABET)}, dict(enumerate(ALPHABET)))
    monkeypatch.setattr('tests.serving.conftest.TOKENIZER', tokenizer)
    monkeypatch.setattr('tests.serving.conftest.TURN', Template('{name}:{text}\n'))
    monkeypatch.setattr('serving.worker.VIEW_INTERVAL', 0.0)  # to replay each step
    return running


@pytest.fixture
def slow_steps(monkeypatch):
    step = Engine.step
    monkeypatch.setattr(Engine, 'step', lambda engine: time.sleep(0.05) or step(engine))


@pytest.fixture
def visit(chromium):
    """`visit(server, **context)` opens the page. It may not fail, print, or ask other servers."""
    opened = []

    def go(server, routes=None, size=(1280, 800), **settings):
        context = chromium.new_context(viewport=dict(zip(('width', 'height'), size)), **settings)
        page, origin, wrong = context.new_page(), f'http://127.0.0.1:{server.port}/', []
        page.on('pageerror', lambda error: wrong.append(str(error)))
        page.on('console', lambda message: wrong.append(message.text))
        page.on('request', lambda asked: asked.url.startswith(origin) or wrong.append(asked.url))
        for path, answer in (routes or {}).items():
            page.route(origin + path, answering(answer))
        opened.append(SimpleNamespace(context=context, wrong=wrong))
        page.goto(origin)
        page.wrong = wrong
        return page
    yield go
    for each in opened:
        each.context.close()
        assert each.wrong == []
