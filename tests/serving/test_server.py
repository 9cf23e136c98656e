"""A server on a port: OpenAI's client, broken sockets, many connections, and shutdown."""
import gc
import json
import re
import socket

import openai
import pytest

from engine.requests.request import Request as EngineRequest
from engine.requests.params import SamplingParams
from serving.app import Generation
from serving.replies import Reply
from serving.worker import Ticket
from tests.helpers.serving import TOKENIZER
from tests.serving.conftest import (
    COMPLETIONS, USER, assert_free, eventually, expected, in_background)


def client_of(server, key='none'):
    return openai.OpenAI(base_url=f'http://127.0.0.1:{server.port}/v1', api_key=key,
                         max_retries=0, timeout=60)


def request(document, path='/v1/completions', **headers) -> bytes:
    """The bytes of an HTTP request."""
    body = json.dumps(document).encode()
    headers = {'Host': 'localhost', 'Content-Type': 'application/json',
               'Content-Length': len(body)} | headers
    lines = [f'POST {path} HTTP/1.1', *(f'{name}: {value}' for name, value in headers.items())]
    return '\r\n'.join(lines).encode() + b'\r\n\r\n' + body


def connect(server, data: bytes) -> socket.socket:
    sock = socket.create_connection(('127.0.0.1', server.port), timeout=60)
    sock.sendall(data)
    return sock


def all_of(sock) -> bytes:
    data = b''
    while piece := sock.recv(65536):
        data += piece
    sock.close()
    return data


def ask(server) -> int:
    data = request(dict(prompt='abc', max_tokens=3), Connection='close')
    return int(all_of(connect(server, data)).split()[1])


def test_openais_client(running):
    server = running(keys=('sesame',))
    client = client_of(server, 'sesame')
    with pytest.raises(openai.AuthenticationError):
        client_of(server).models.list()
    with pytest.raises(openai.BadRequestError, match='lacks') as caught:
        client.completions.create(model='tiny', prompt='Q')
    assert caught.value.param == 'prompt'
    assert [model.id for model in client.models.list()] == ['tiny']
    said = expected('acjabdbc', 30, seed=1, stop=('d',), logprobs=3)
    fields = dict(model='tiny', messages=[USER], max_tokens=30, seed=1, logprobs=True,
                  top_logprobs=3)
    [choice] = client.chat.completions.create(**fields).choices
    assert (choice.message.content, choice.finish_reason) == (said.text, said.finish_reason)
    pieces = [piece.choices[0] for piece in client.chat.completions.create(**fields, stream=True)]
    assert ''.join(piece.delta.content or '' for piece in pieces) == said.text
    assert pieces[-1].finish_reason == said.finish_reason
    streamed = [entry for piece in pieces if piece.logprobs for entry in piece.logprobs.content]
    for entries in (choice.logprobs.content, streamed):
        for entry, it in zip(entries, said.logprobs, strict=True):
            text = TOKENIZER.decode([it.token])
            assert (entry.token, bytes(entry.bytes)) == (text, text.encode())
            assert entry.logprob == pytest.approx(it.logprob)
            assert [(top.token, top.logprob) for top in entry.top_logprobs] == [
                (TOKENIZER.decode([token]), pytest.approx(logprob)) for token, logprob in it.top]
    [choice] = client.chat.completions.create(**fields | dict(top_logprobs=0)).choices
    assert choice.logprobs.content[0].top_logprobs == []


POST = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n'
MALFORMED = [
    b'GARBAGE\r\n\r\n', b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03',
    POST + b'Content-Length: abc\r\n\r\n',
    POST + b'Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n',
    b'GET /' + b'a' * 100_000 + b' HTTP/1.1\r\nHost: localhost\r\n\r\n',
]


CHUNKED = b'0\r\n\r\n'
# what servers may take for different requests
AMBIGUOUS = [
    *(POST + head + b'\r\n\r\n' + CHUNKED for head in (
        b'Content-Length: 5\r\nContent-Length: 6', b'Content-Length: 5, 6', b'Content-Length: +5',
        b'Content-Length : 5', b'Transfer-Encoding: identity', b'Transfer-Encoding: xchunked',
        b'Transfer-Encoding: chunked, identity', b'Transfer-Encoding: \x0bchunked',
        b'Transfer-Encoding: chunked\r\nTransfer-Encoding: identity',
        b'X: a\rContent-Length: 5', b'X: a\0b')),
    b'POST / HTTP/1.1\r\n Host: a\r\nHost: localhost\r\n\r\n', POST + b'Host: b\r\n\r\n']


@pytest.mark.parametrize('data', AMBIGUOUS)
def test_requests_of_ambiguous_length_are_refused_and_nothing_after_them_is_read(running, data):
    server = running(cors='http://page.example')
    answer = all_of(connect(server, data + b'GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n'))
    assert answer.startswith(b'HTTP/1.1 400') and answer.count(b'HTTP/1.1') == 1
    assert b'connection: close' in answer.lower()


@pytest.mark.parametrize('head', [b'Transfer-Encoding:\r\n chunked', b'X: a\r\n Content-Length: 9'])
def test_folded_headers_are_one_line(running, head):
    """As RFC 9112, section 5.2, asks of a server that does not refuse them."""
    get, body = b'GET /health HTTP/1.1\r\nHost: localhost\r\n', CHUNKED * (b'chunked' in head)
    answer = all_of(connect(running(), get + head + b'\r\n\r\n' + body + get +
                            b'Connection: close\r\n\r\n'))
    assert answer.count(b'HTTP/1.1 200 OK') == 2 == answer.count(b'HTTP/1.1')


def test_broken_requests_are_refused_and_leave_nothing_behind(running):
    server = running()
    for data in MALFORMED:
        sock = connect(server, data)
        sock.shutdown(socket.SHUT_WR)
        try:
            answer = all_of(sock)
        except ConnectionResetError:
            answer = b''
        assert answer == b'' or int(answer.split()[1]) in (400, 404, 411), (data, answer)
        assert ask(server) == 200, data
    whole = request(dict(prompt='abc'))
    for cut in (len(whole) - 1, whole.index(b'\r\n\r\n') + 4, 10):
        connect(server, whole[:cut]).close()
    assert ask(server) == 200
    assert_free(server.worker)


def test_a_body_that_is_too_large_or_does_not_come(running):
    server = running(timeout=0.2, max_body=200)
    for size, status in ((201, b'413'), (20, b'408')):
        sock = connect(server, request('a' * size, **{'Content-Length': 1000}))
        assert all_of(sock).split()[1] == status


@pytest.mark.parametrize('stream', [True, False])
def test_a_disconnect_cancels_all_choices(running, held, stream):
    """Of a waiting request and of a running one."""
    server = running(rows=1)
    fields = dict(prompt='abcdefgh', max_tokens=50, n=3, stream=stream)
    socks = [connect(server, request(fields)) for _ in range(2)]
    server.wait_for(6)
    assert held.in_step.wait(60)
    socks[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b'\1\0\0\0\0\0\0\0')  # reset
    for sock in socks:
        sock.close()
    eventually(lambda: len(server.logged) == 2)
    held.set()
    assert_free(server.worker)
    assert all(re.search(r' 499: .*, client left$', line) for line in server.logged)
    assert server.metric('tokens_generated_total') <= 1  # from the step that was paused
    assert server.metric('requests_total', route=COMPLETIONS, status='499') == 2


@pytest.mark.parametrize('path, n', [(COMPLETIONS, 2), ('/nanokv/completions', 1)])
def test_a_disconnect_within_a_stream_cancels(running, held, path, n):
    server = running(rows=2)
    held.release(3)
    fields = dict(prompt='abcdefgh', max_tokens=50, n=n, stream=True)
    sock = connect(server, request(fields, path))
    assert b'200 OK' in sock.recv(65536)
    other = in_background(lambda: server.text(seed=1))
    server.wait_for(n + 1)
    sock.close()
    eventually(lambda: server.logged)
    held.set()
    assert re.search(r' 200: .*, client left$', server.logged[0])
    assert other.result() == expected('abc', seed=1).text
    assert_free(server.worker)


@pytest.mark.parametrize('more', [dict(), dict(stream=True, logprobs=2), dict(max_tokens=10 ** 6)],
                         ids=['whole', 'stream', 'refused'])
def test_an_ended_request_is_freed_without_the_garbage_collector(running, more):
    """It rarely runs in a process with as many objects as torch has: prompts would pile up."""
    server = running()
    gc.collect()
    gc.disable()
    try:
        for _ in range(8):
            all_of(connect(server, request(dict(prompt='abc') | more, Connection='close')))
        assert_free(server.worker)
        kinds = Generation, Reply, EngineRequest
        eventually(lambda: sum(type(x) in kinds for x in gc.get_objects()) <= 3)
    finally:
        gc.enable()


def stopping(server):
    server.server.should_exit = True
    eventually(lambda: not server.worker.alive)


def test_at_the_end_who_runs_is_answered_and_nobody_else(running, held):
    server = running(grace=60.0)
    statuses = [in_background(lambda: ask(server)) for _ in range(3)]
    server.wait_for(3)
    stopping(server)
    with pytest.raises(OSError):
        connect(server, b'').recv(1)
    held.set()
    assert [status.result() for status in statuses] == [200] * 3
    server.thread.join(60)
    assert not server.worker.is_alive()
    assert_free(server.worker)


@pytest.mark.parametrize('stream', [False, True])
def test_at_the_end_who_takes_too_long_is_told(running, held, stream):
    held.release(2)
    server = running(grace=0.0)
    sock = connect(server, request(dict(prompt='abc', max_tokens=50, stream=stream)))
    data = sock.recv(30) if stream else b''
    eventually(lambda: held._value == 0)
    stopping(server)
    held.set()
    data += all_of(sock)
    assert b'the server is stopping' in data and data.split()[1] == (b'200' if stream else b'503')
    server.thread.join(60)
    assert_free(server.worker)


@pytest.mark.parametrize('interrupted', [False, True])
def test_at_the_end_a_step_that_hangs_is_left_behind(running, held, monkeypatch, interrupted):
    """After some seconds, or at a second Ctrl-C."""
    monkeypatch.setattr('serving.server.CLOSE_TIMEOUT', 600.0 if interrupted else 0.1)
    server = running(grace=0.0)
    server.worker.submit(Ticket([([1, 2], SamplingParams(5))], lambda items: None))
    stopping(server)
    server.server.force_exit = interrupted
    server.thread.join(60)
    assert not server.thread.is_alive() and server.worker.is_alive()
    held.set()
    server.worker.join(60)
