"""The client against servers that follow a script."""
import json
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from config.errors import UserError
from lab.sessions import client as clients
from lab.sessions.client import Client, Failed

USAGE = {'prompt_tokens': 9, 'completion_tokens': 4,
         'prompt_tokens_details': {'cached_tokens': 8}}
DONE = '[DONE]'


@dataclass
class Says:
    """A response. parts: JSON documents or texts of a stream, or seconds to wait. cut: the
    connection is closed without the end that chunks need. raw: all of it, instead."""
    parts: list = field(default_factory=list)
    status: int = 200
    headers: dict = field(default_factory=dict)
    body: bytes | None = None  # instead of a stream
    chunked: bool = False
    cut: bool = False
    raw: bytes = b''


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        server, body = self.server, self.rfile.read(int(self.headers.get('Content-Length', 0)))
        server.requests.append((self.command, self.path, dict(self.headers),
                                json.loads(body) if body else None, time.perf_counter()))
        says = server.script.pop(0) if len(server.script) > 1 else server.script[0]
        self.close_connection = True
        if says.raw:
            self.wfile.write(says.raw)
            return
        self.send_response(says.status)
        for name, value in says.headers.items():
            self.send_header(name, value)
        how = {'Transfer-Encoding': 'chunked'} if says.chunked else {'Connection': 'close'}
        for name, value in how.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            if says.body is not None:
                self.wfile.write(says.body)
            for part in says.parts:
                self.part(part, says.chunked)
            if says.chunked and not says.cut:
                self.wfile.write(b'0\r\n\r\n')
        except OSError:
            server.left.set()

    def part(self, part, chunked):
        if isinstance(part, float):
            self.server.stopped.wait(part)
            return
        data = f'data: {part if isinstance(part, str) else json.dumps(part)}\n\n'.encode()
        self.wfile.write(b'%x\r\n%s\r\n' % (len(data), data) if chunked else data)
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
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        made.append((server, thread))
        return server
    yield make
    for server, thread in made:
        server.stopped.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


def choice(**fields):
    return {'choices': [{'index': 0} | fields]}


def failure(server, **settings) -> str:
    with pytest.raises(Failed) as raised:
        Client(server.url, **settings).ask('completions', {'prompt': 'a'})
    return str(raised.value)


# -- replies ---------------------------------------------------------------------------------------

STREAMS = {
    'vLLM and nanoKV': ([choice(text='ab', token_ids=[5, 6]), choice(text='', token_ids=[7]),
                         choice(text='c', token_ids=[8], finish_reason='length')],
                        'abc', [5, 6, 7, 8], 3),
    'llama.cpp': ([choice(text='a') | {'__verbose': {'tokens': [5]}},
                   choice(text='b') | {'__verbose': {'tokens': [6]}},
                   choice(text='', finish_reason='length') | {'__verbose': {'tokens': []}}],
                  'ab', [5, 6], 2),
    'text alone': ([choice(text='a'), choice(text='b', token_ids=None),
                    choice(text='', finish_reason='stop')], 'ab', [], 2),
    'chat': ([choice(delta={'role': 'assistant', 'content': ''}), choice(delta={'content': 'xy'}),
              choice(delta={'content': None}), choice(delta={'content': 'z'}),
              choice(delta={}, finish_reason='stop')], 'xyz', [], 2),
    'thoughts': ([choice(delta={'reasoning_content': 'hm'}), choice(delta={'reasoning': 'hm'}),
                  choice(delta={'content': 'x'})], 'x', [], 3),
    'chat with ids': ([choice(delta={'role': 'assistant', 'content': ''}),
                       choice(delta={'content': 'x'}, token_ids=[3]),
                       choice(delta={'content': ''}, token_ids=[4]),
                       choice(delta={}, finish_reason='stop')], 'x', [3, 4], 2)}


@pytest.mark.parametrize('chunked', [True, False])
@pytest.mark.parametrize('name', STREAMS)
def test_parts_of_a_reply(scripted, name, chunked):
    parts, text, tokens, n_stamps = STREAMS[name]
    server = scripted(Says([*parts, {'choices': [], 'usage': USAGE}, DONE], chunked=chunked))
    before = time.perf_counter()
    answer = Client(server.url).ask('completions', {'prompt': 'abc', 'model': 'm'})
    assert (answer.text, answer.tokens, answer.usage) == (text, tokens, USAGE)
    assert len(answer.stamps) == n_stamps and answer.refused == 0
    times = [before, answer.started, *answer.stamps, time.perf_counter()]
    assert times == sorted(times)
    [(method, path, headers, document, _)] = server.requests
    assert (method, path) == ('POST', '/v1/completions')
    assert headers['Content-Type'] == 'application/json' and 'Authorization' not in headers
    assert document == {'prompt': 'abc', 'model': 'm', 'stream': True,
                        'stream_options': {'include_usage': True}}


def test_usage_may_come_with_each_part_or_not_at_all(scripted):
    parts = [choice(text='a') | {'usage': None}, choice(text='b') | {'usage': {'prompt_tokens': 1}},
             {'choices': [], 'usage': USAGE}, {'choices': [], 'usage': None}, DONE]
    assert Client(scripted(Says(parts)).url).ask('completions', {}).usage == USAGE
    parts = [choice(text='a'), DONE]
    assert Client(scripted(Says(parts)).url).ask('completions', {}).usage == {}


def test_stamps_are_when_parts_come_and_what_follows_the_end_is_left(scripted):
    server = scripted(Says([choice(text='a'), 0.3, choice(text='b'), DONE, 30.0,
                            choice(text='c')], chunked=True))
    answer = Client(server.url).ask('completions', {})
    first, second = answer.stamps
    assert second - first > 0.1 and answer.text == 'ab'
    assert time.perf_counter() - answer.started < 20


def test_lines_of_a_stream_that_are_no_data(scripted):
    events = (b': ping\n\nevent: cache\ndata:{"choices": [{"text": "a"}]}\n\nid: 5\n\n'
              b'data: {"choices": [{"text": "b"}]}\r\n\r\ndata: [DONE]\r\n\r\n')
    assert Client(scripted(Says(body=events)).url).ask('completions', {}).text == 'ab'


@pytest.mark.parametrize('chunked', [True, False])
def test_hanging_up_after_so_many_parts(scripted, chunked):
    endless = [choice(delta={'role': 'assistant', 'content': ''})]
    endless += [choice(text='a'), 0.005] * 10_000
    server = scripted(Says(endless, chunked=chunked))
    client = Client(server.url)
    answer = client.ask('completions', {}, most_parts=3)
    assert answer.text == 'aaa' and len(answer.stamps) == 3
    assert server.left.wait(20), 'the connection stayed open'


# -- failures --------------------------------------------------------------------------------------

@pytest.mark.parametrize('end', [dict(), dict(chunked=True), dict(chunked=True, cut=True)], ids=str)
def test_a_stream_that_ends_early(scripted, end):
    for parts in ([], [choice(text='a'), choice(text='b', finish_reason='length')]):
        assert failure(scripted(Says(parts, **end)))


@pytest.mark.parametrize('error', [{'message': 'no room'}, 'no room'], ids=str)
def test_an_error_in_the_stream(scripted, error):
    server = scripted(Says([choice(text='a'), {'error': error}, choice(text='b'), DONE]))
    assert 'no room' in failure(server)


def test_refused_requests(scripted):
    error = {'error': {'message': 'max_tokens=0: must be at least 1', 'type': 'x', 'param': None}}
    for body in (error, {'error': 'max_tokens=0: x'}, {'detail': 'max_tokens=0'}):
        server = scripted(Says(status=400, body=json.dumps(body).encode()))
        message = failure(server)
        assert '400' in message and 'max_tokens=0' in message
        assert len(server.requests) == 1  # not asked again


@pytest.mark.parametrize('says', [
    Says(['{"choices": ', DONE]), Says(['5', DONE]), Says(['[]', DONE]), Says(['', DONE]),
    Says(body=b'data: \xff\xfe\n\n'), Says(body=b'{"choices": []}'), Says(body=b'<html>'),
    Says(raw=b'hello\r\n\r\n'), Says(status=500, body=b'<html>'), Says(status=500, body=b''),
    Says(status=404, body=b'[]')], ids=str)
def test_bodies_that_are_not_what_they_should_be(scripted, says):
    assert failure(scripted(says))


def test_nobody_listens():
    with socket.socket() as sock:
        sock.bind(('127.0.0.1', 0))
        url = f'http://127.0.0.1:{sock.getsockname()[1]}'
    with pytest.raises(Failed, match='refused'):
        Client(url).ask('completions', {})
    with pytest.raises(Failed, match='refused'):
        Client(url).model()


@pytest.mark.parametrize('parts', [[30.0], [choice(text='a'), 30.0, DONE]], ids=len)
def test_a_server_that_does_not_go_on(scripted, parts):
    start = time.perf_counter()
    failure(scripted(Says(parts)), timeout=0.2)
    assert time.perf_counter() - start < 15


# -- busy servers ----------------------------------------------------------------------------------

def test_a_busy_server_is_asked_again(scripted):
    busy = [Says(status=status, headers={'Retry-After': '0.15'}, body=b'{"error": "later"}')
            for status in (429, 503)]
    server = scripted(*busy, Says([choice(text='a'), DONE]))
    answer = Client(server.url).ask('completions', {'prompt': 'b'})
    assert answer.refused == 2 and answer.text == 'a' and len(answer.stamps) == 1
    came = [request[-1] for request in server.requests]
    assert len(came) == 3 and all(b - a >= 0.15 for a, b in zip(came, came[1:]))
    assert answer.started <= came[0] and answer.stamps[0] - answer.started >= 0.3
    assert all(request[3]['prompt'] == 'b' for request in server.requests)


@pytest.mark.parametrize('value', [None, 'Wed, 21 Oct 2026 07:28:00 GMT', ''])
def test_a_busy_server_that_does_not_say_for_how_many_seconds(scripted, value, monkeypatch):
    monkeypatch.setattr(clients, 'RETRY_S', 0.1)
    headers = {} if value is None else {'Retry-After': value}
    server = scripted(Says(status=429, headers=headers), Says([choice(text='a'), DONE]))
    assert Client(server.url).ask('completions', {}).refused == 1
    first, second = (request[-1] for request in server.requests)
    assert 0.1 <= second - first < 10


def test_a_server_that_stays_busy(scripted):
    start = time.perf_counter()
    server = scripted(Says(status=429, headers={'Retry-After': '0.1'}))
    assert 'refused' in failure(server, timeout=0.45)
    assert 2 <= len(server.requests) <= 5
    server = scripted(Says(status=503, headers={'Retry-After': '1000'}))
    assert 'refused 1 times' in failure(server)
    assert len(server.requests) == 1 and time.perf_counter() - start < 15


# -- addresses, keys, models -----------------------------------------------------------------------

MODELS = Says(body=b'{"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]}')


@pytest.mark.parametrize('form, base', [
    ('127.0.0.1:{}', '/v1'), ('http://127.0.0.1:{}', '/v1'), ('http://127.0.0.1:{}/', '/v1'),
    ('http://127.0.0.1:{}/v1', '/v1'), ('http://127.0.0.1:{}/v1/', '/v1'),
    ('127.0.0.1:{}/v1', '/v1'), ('http://127.0.0.1:{}/base/v2', '/base/v2'),
    ('HTTP://LOCALHOST:{}/v1', '/v1')])
def test_forms_of_an_address(scripted, form, base):
    server = scripted(MODELS, Says([choice(text='a'), DONE]))
    client = Client(form.format(server.server_port))
    assert client.model() == 'tiny'
    client.ask('chat/completions', {})
    assert [request[:2] for request in server.requests] == [
        ('GET', f'{base}/models'), ('POST', f'{base}/chat/completions')]


@pytest.mark.parametrize('url', [
    '', '/v1', 'http://', 'http:///v1', 'ftp://127.0.0.1', 'file:///x', '://', '127.0.0.1:port',
    'http://127.0.0.1:99999', 'http://[::1'])
def test_addresses_of_no_server(url):
    with pytest.raises(UserError, match='url='):
        Client(url)


def test_the_key_is_sent(scripted):
    server = scripted(MODELS, Says([choice(text='a'), DONE]))
    client = Client(server.url, 'sesame')
    client.model()
    client.ask('completions', {})
    assert [request[2]['Authorization'] for request in server.requests] == ['Bearer sesame'] * 2


def test_a_model_that_is_chosen(scripted):
    two = Says(body=b'{"data": [{"id": "one"}, {"id": "two"}]}')
    url = scripted(two, two, two).url
    assert (Client(url).model(), Client(url, name='two').model()) == ('one', 'two')
    with pytest.raises(Failed, match="no model 'three', only one, two"):
        Client(url, name='three').model()


@pytest.mark.parametrize('says, named', [
    (Says(status=401, body=b'{"error": {"message": "a key is needed"}}'), '401'),
    (Says(body=b'{"data": []}'), 'no list of models'), (Says(body=b'{"data": [5]}'), 'models'),
    (Says(body=b'{}'), 'models'), (Says(body=b'<html>'), '<html>')], ids=str)
def test_servers_that_name_no_model(scripted, says, named):
    with pytest.raises(Failed, match=named):
        Client(scripted(says).url).model()
