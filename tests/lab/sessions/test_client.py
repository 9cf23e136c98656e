"""The client against servers that follow a script."""
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

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
    body: bytes = b''
    cut: bool = False


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def do_POST(self):
        server, body = self.server, self.rfile.read(int(self.headers['Content-Length']))
        server.requests.append((self.path, dict(self.headers), json.loads(body)))
        says = server.script.pop(0) if len(server.script) > 1 else server.script[0]
        self.close_connection = True
        self.send_response(says.status)
        for name, value in (says.headers | {'Transfer-Encoding': 'chunked'}).items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.chunk(says.body)
            for part in says.parts:
                if isinstance(part, float):
                    server.stopped.wait(part)
                else:
                    data = part if isinstance(part, str) else json.dumps(part)
                    self.chunk(f'data: {data}\n\n'.encode())
            if not says.cut:
                self.wfile.write(b'0\r\n\r\n')
        except OSError:  # the client hung up
            pass

    def chunk(self, data):
        if data:
            self.wfile.write(b'%x\r\n%s\r\n' % (len(data), data))
            self.wfile.flush()

    def log_message(self, *_):
        pass


@pytest.fixture
def scripted():
    """`scripted(*responses)` starts a server that gives them in turn, and then the last one again.
    requests: what it was asked."""
    servers = []

    def make(*script):
        server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        server.script, server.requests, server.stopped = list(script), [], threading.Event()
        server.url = f'http://127.0.0.1:{server.server_port}'
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server
    yield make
    for server in servers:
        server.stopped.set()
        server.shutdown()
        server.server_close()


def choice(**fields):
    return {'choices': [{'index': 0} | fields]}


STREAMS = {
    'vLLM and nanoKV': ([choice(text='ab', token_ids=[5, 6]), choice(text='', token_ids=[7]),
                         choice(text='c', token_ids=[8], finish_reason='length')],
                        [5, 6, 7, 8], 3),
    'llama.cpp': ([choice(text='a') | {'__verbose': {'tokens': [5]}},
                   choice(text='b') | {'__verbose': {'tokens': [6]}},
                   choice(text='', finish_reason='length') | {'__verbose': {'tokens': []}}],
                  [5, 6], 2),
    'text alone': ([choice(text='a'), choice(text='b', token_ids=None)], [], 2)}


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
    [(path, headers, document)] = server.requests
    assert path == '/v1/completions' and 'Authorization' not in headers
    assert document == {'prompt': 'abc', 'model': 'm', 'stream': True,
                        'stream_options': {'include_usage': True}}


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
    monkeypatch.setattr(clients, 'RETRY_S', 0.05)
    busy = (Says(status=status) for status in (429, 503, 429))
    server = scripted(*busy, Says([choice(text='a'), DONE]))
    answer = asked(Client(server.url))
    assert answer.refused == 3 and len(answer.stamps) == 1
    assert all(document['prompt'] == 'abc' for *_, document in server.requests)
    with pytest.raises(Failed, match='refused . times'):  # it stays busy
        asked(Client(scripted(Says(status=429)).url, timeout=0.45))
