"""The client against servers that follow a script."""
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from config.errors import UserError
from lab.sessions import client as clients
from lab.sessions.client import Answer, Client, Failed

USAGE = {'prompt_tokens': 9, 'completion_tokens': 4,
         'prompt_tokens_details': {'cached_tokens': 8}}
DONE = '[DONE]'


@dataclass
class Says:
    """A response in chunks. parts: JSON documents or texts of a stream, or seconds to wait. body:
    sent before it. cut: the connection is closed without the end that chunks need."""
    parts: list = field(default_factory=list)
    status: int = 200
    headers: dict = field(default_factory=dict)
    body: bytes | None = None
    cut: bool = False


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def do_POST(self):
        server, body = self.server, self.rfile.read(int(self.headers.get('Content-Length', 0)))
        server.requests.append((self.command, self.path, dict(self.headers),
                                json.loads(body) if body else None, time.perf_counter()))
        says = server.script.pop(0) if len(server.script) > 1 else server.script[0]
        self.close_connection = True
        self.send_response(says.status)
        for name, value in (says.headers | {'Transfer-Encoding': 'chunked'}).items():
            self.send_header(name, value)
        self.end_headers()
        try:
            if says.body:
                self.chunk(says.body)
            for part in says.parts:
                if isinstance(part, float):
                    server.stopped.wait(part)
                else:
                    data = part if isinstance(part, str) else json.dumps(part)
                    self.chunk(f'data: {data}\n\n'.encode())
            if not says.cut:
                self.chunk(b'')
        except OSError:
            server.left.set()

    def chunk(self, data):
        self.wfile.write(b'%x\r\n%s\r\n' % (len(data), data))
        self.wfile.flush()

    def log_message(self, *_):
        pass


@pytest.fixture
def scripted():
    """`scripted(*responses)` starts a server that gives them in turn, and then the last one again.
    requests: what it was asked. left: set when a client hung up before the end."""
    made = []

    def make(*script):
        server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        server.script, server.requests, server.left = list(script), [], threading.Event()
        server.daemon_threads, server.stopped = True, threading.Event()
        server.url = f'http://127.0.0.1:{server.server_port}'
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        made.append(server)
        return server
    yield make
    for server in made:
        server.stopped.set()
        server.shutdown()
        server.server_close()


def choice(**fields):
    return {'choices': [{'index': 0} | fields]}


# -- replies ---------------------------------------------------------------------------------------

STREAMS = {
    'vLLM and nanoKV': ([choice(text='ab', token_ids=[5, 6]), choice(text='', token_ids=[7]),
                         choice(text='c', token_ids=[8], finish_reason='length')],
                        [5, 6, 7, 8], 3),
    'llama.cpp': ([choice(text='a') | {'__verbose': {'tokens': [5]}},
                   choice(text='b') | {'__verbose': {'tokens': [6]}},
                   choice(text='', finish_reason='length') | {'__verbose': {'tokens': []}}],
                  [5, 6], 2),
    'text alone': ([choice(text='a'), choice(text='b', token_ids=None),
                    choice(text='', finish_reason='stop')], [], 2)}


def asked(client, document=None):
    answer = Answer(4)
    client.ask(document or {'prompt': 'abc'}, answer)
    return answer


@pytest.mark.parametrize('name', STREAMS)
def test_parts_of_a_reply(scripted, name):
    parts, tokens, n_stamps = STREAMS[name]
    server = scripted(Says([*parts, {'choices': [], 'usage': USAGE}, {'usage': None}, DONE]))
    answer = asked(Client(server.url), {'prompt': 'abc', 'model': 'm'})
    assert (answer.tokens, answer.usage) == (tokens, USAGE)
    assert len(answer.stamps) == n_stamps and answer.refused == 0
    [(method, path, headers, document, _)] = server.requests
    assert (method, path) == ('POST', '/v1/completions') and 'Authorization' not in headers
    assert document == {'prompt': 'abc', 'model': 'm', 'stream': True,
                        'stream_options': {'include_usage': True}}


def test_stamps_are_when_parts_come_and_what_follows_the_end_is_left(scripted):
    """Lines of a stream that are no data are left too."""
    lines = (b': ping\n\nevent: cache\ndata:{"choices": [{"text": "a"}]}\n\nid: 5\n\n'
             b'data: {"choices": [{"text": "b"}]}\r\n\r\n')
    server = scripted(Says([0.3, choice(text='c'), DONE, 30.0, choice(text='d')], body=lines))
    answer = asked(Client(server.url))
    first, second, third = answer.stamps
    assert third - second > 0.1 and answer.usage == {}
    assert answer.started < first and time.perf_counter() - answer.started < 20


# -- failures --------------------------------------------------------------------------------------

@pytest.mark.parametrize('says, why', [
    (Says([choice(text='a')]), 'ended early'),
    (Says([choice(text='a')], cut=True), 'early|Incomplete'),
    (Says([choice(text='a'), {'error': {'message': 'no room'}}, DONE]), 'no room'),
    (Says(status=400, body=b'{"error": "max_tokens=0"}'), 'status 400: .*max_tokens=0'),
    (Says(status=302, headers={'Location': 'http://127.0.0.1:1/'}), 'status 302'),
    (Says([choice(text='a'), 30.0, DONE]), 'timed out'),
    (Says([choice(text='a'), 0.05] * 1000), 'not complete')], ids=str)
def test_replies_that_fail(scripted, says, why):
    server, start = scripted(says), time.perf_counter()
    with pytest.raises(Failed, match=why):
        asked(Client(server.url, timeout=0.4))
    assert len(server.requests) == 1 and time.perf_counter() - start < 15


def test_a_busy_server_is_asked_again(scripted, monkeypatch):
    monkeypatch.setattr(clients, 'RETRY_S', 0.1)
    busy = (Says(status=status) for status in (429, 503, 429))
    server = scripted(*busy, Says([choice(text='a'), DONE]))
    answer = asked(Client(server.url))
    assert answer.refused == 3 and len(answer.stamps) == 1
    came = [request[-1] for request in server.requests]
    assert all(0.1 <= b - a < 10 for a, b in zip(came, came[1:]))
    assert answer.started <= came[0] and answer.stamps[0] - answer.started >= 0.3
    assert all(request[3]['prompt'] == 'abc' for request in server.requests)
    with pytest.raises(Failed, match='refused . times'):  # it stays busy
        asked(Client(scripted(Says(status=429)).url, timeout=0.45))


# -- addresses and keys ----------------------------------------------------------------------------

@pytest.mark.parametrize('form, base', [
    ('127.0.0.1:{}', '/v1'), ('http://127.0.0.1:{}/v1/', '/v1'),
    ('HTTP://LOCALHOST:{}/base/v2', '/base/v2')])
def test_forms_of_an_address(scripted, form, base, monkeypatch):
    monkeypatch.setenv('OPENAI_API_KEY', 'sesame')
    server = scripted(Says([choice(text='a'), DONE]))
    asked(Client(form.format(server.server_port)))
    [(method, path, headers, *_)] = server.requests
    assert (method, path) == ('POST', f'{base}/completions')
    assert headers['Authorization'] == 'Bearer sesame'


@pytest.mark.parametrize('url, why', [
    ('ftp://127.0.0.1', 'url='), ('', 'url='), ('127.0.0.1:port', 'port'),
    ('127.0.0.1:1', "url='127.0.0.1:1': .*refused")])
def test_addresses_of_no_server(url, why):
    with pytest.raises(UserError, match=why):
        asked(Client(url))
