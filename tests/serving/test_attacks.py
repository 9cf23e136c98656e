"""Clients that hold on to what they can: none keeps the others waiting, and none stays for ever. What a chat may say."""
import asyncio
import json
import socket
import threading
import time

import pytest
from starlette.testclient import TestClient

from data.tokenizer import CharTokenizer
from engine.dialogue import Template
from engine.params import SamplingParams
from serving import app as serving_app
from serving.api import GenerationRequest
from serving.replies import Reply
from serving.server import bind
from tests.helpers.serving import TOKENIZER, alone, model_of
from tests.serving.conftest import Asgi, assert_free, eventually, make_server
from tests.serving.test_limits import assert_refused, in_background
from tests.serving.test_server import ask, connect, request

COMPLETIONS, CHAT = '/v1/completions', '/v1/chat/completions'


class Slow:
    """The tests' tokenizer, whose `encode` waits for `go.set()`; waiting: calls that do."""

    def __init__(self):
        self.go, self.waiting, self.lock = threading.Event(), 0, threading.Lock()

    def __getattr__(self, name):
        return getattr(TOKENIZER, name)

    def encode(self, *args, **kwargs):
        with self.lock:
            self.waiting += 1
        assert self.go.wait(60)
        return TOKENIZER.encode(*args, **kwargs)


@pytest.fixture
def slow(serve, monkeypatch):
    """`slow(**settings)`: a server whose requests are read slowly."""
    def make(**settings):
        server = serve(**settings)
        server.tokenizer = Slow()
        object.__setattr__(server.service, 'tokenizer', server.tokenizer)
        return server
    return make


# -- others go on -----------------------------------------------------------------------------------------------------

def test_a_large_answer_is_written_beside_others(running, monkeypatch):
    server, gate, entered, plain = running(), threading.Event(), threading.Event(), Reply.document

    def document(reply):
        entered.set()
        assert gate.wait(60)
        return plain(reply)
    monkeypatch.setattr(Reply, 'document', document)
    large = in_background(lambda: ask(server))
    assert entered.wait(60)
    sock = connect(server, b'GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n')
    assert b'200 OK' in sock.recv(1000)
    sock.close()
    gate.set()
    large.join()
    assert large.result == 200


def test_pieces_are_made_for_streams_alone(monkeypatch):
    made = []
    monkeypatch.setattr(Reply, 'pieces', lambda reply, *_: made.append(1) or [])
    completion = alone(model_of('full stack'), 'abc', SamplingParams(3, logprobs=2), tokenizer=TOKENIZER)
    from engine.engine import Event
    for stream in (False, True):
        reply = Reply(GenerationRequest([[1]], [SamplingParams(3)], 1, stream), 'tiny', TOKENIZER)
        reply.take(0, Event(0, 1, 'a', completion.logprobs[0], completion))
        assert reply.complete and len(made) == stream


def test_few_are_read_at_once(slow):
    server = slow()
    threads = [in_background(lambda: server.client.post(COMPLETIONS, json=dict(prompt='abc', seed=1))) for _ in range(6)]
    eventually(lambda: server.tokenizer.waiting == serving_app.PARSERS)
    time.sleep(0.1)
    assert server.tokenizer.waiting == serving_app.PARSERS
    server.tokenizer.go.set()
    for thread in threads:
        thread.join()
        assert thread.result.status_code == 200


def test_who_leaves_while_being_read_is_never_begun(slow):
    server, submitted = slow(), []
    plain = server.worker.submit
    server.worker.submit = lambda *args: submitted.append(1) or plain(*args)

    async def scenario():
        gone = Asgi(server.app, COMPLETIONS, json.dumps(dict(prompt='abc')).encode())
        task = asyncio.create_task(gone.run())
        while not server.tokenizer.waiting:
            await asyncio.sleep(0.01)
        gone.gone.set()
        await asyncio.sleep(0.05)
        server.tokenizer.go.set()
        await task
        return gone.sent
    assert asyncio.run(scenario()) == [] and submitted == []


def test_reading_counts_for_the_time_out(slow):
    server = slow(timeout=0.3)
    response = server.client.post(COMPLETIONS, json=dict(prompt='abc'))
    assert_refused(response, 504, '0.3 s')
    assert response.headers['x-should-retry'] == 'false'  # OpenAI's client would ask twice more
    server.tokenizer.go.set()


def test_nothing_is_read_where_nobody_is_let_in(slow, held):
    server = slow(rows=1, max_waiting=0)
    server.worker.submit([([1], SamplingParams(2))], lambda items: None)
    assert server.client.post(COMPLETIONS, json=dict(prompt='abc')).status_code == 429
    server.worker.drain(60)
    assert server.client.post(COMPLETIONS, json=dict(prompt='abc')).status_code == 503
    assert server.tokenizer.waiting == 0
    held.set()


@pytest.mark.parametrize('document', [dict(prompt='a' * 61), dict(messages=[{'role': 'user', 'content': 'a' * 61}])])
def test_a_text_that_is_too_long_is_not_encoded(slow, document):
    server = slow()
    response = server.client.post(COMPLETIONS if 'prompt' in document else CHAT, json=document)
    assert_refused(response, 400, '61 characters', '60 tokens', code='context_length_exceeded')
    assert server.tokenizer.waiting == 0


def test_of_a_conversation_that_is_too_long_the_end_is_not_encoded(slow):
    server = slow()
    server.tokenizer.go.set()
    response = server.client.post(CHAT, json=dict(messages=[{'role': 'user', 'content': 'a' * 40}] * 100))
    assert_refused(response, 400, 'the conversation has 86 tokens', param='messages')
    assert server.tokenizer.waiting <= 3


# -- nobody stays -----------------------------------------------------------------------------------------------------

def ended(sock) -> bool:
    sock.settimeout(0.01)
    try:
        return sock.recv(65536) == b''
    except TimeoutError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize('sent', [b'', b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow:'])
def test_a_head_that_does_not_come(running, monkeypatch, sent):
    monkeypatch.setattr('serving.server.IDLE_TIMEOUT', 0.3)
    server = running()
    sock = connect(server, sent)
    eventually(lambda: ended(sock))
    assert ask(server) == 200


def test_a_body_that_drips_behind_a_refusal(running, monkeypatch):
    monkeypatch.setattr('serving.server.IDLE_TIMEOUT', 0.3)
    server = running(keys=('sesame',))
    sock = connect(server, request(dict(prompt='abc'), **{'Content-Length': 10 ** 4}))
    assert b'401' in sock.recv(65536)

    def dripped():
        try:
            sock.send(b' ')
        except OSError:
            return True
        return ended(sock)
    eventually(dripped)


def test_an_answer_that_is_not_read(running, monkeypatch):
    monkeypatch.setattr('serving.server.IDLE_TIMEOUT', 0.5)

    def small(*address):  # the system would take megabytes off the server's hands
        sock = bind(*address)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        return sock
    monkeypatch.setattr('tests.serving.conftest.bind', small)
    server, sock = running(max_waiting=16), socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect(('127.0.0.1', server.port))
    sock.sendall(request(dict(prompt='abc', n=16, max_tokens=30, logprobs=20), Connection='close'))
    eventually(lambda: any(c.transport.get_write_buffer_size() for c in server.server.server_state.connections))
    eventually(lambda: not server.server.server_state.connections)
    sock.close()
    assert_free(server.worker)


def test_a_request_at_work_is_no_idle_connection(running, monkeypatch, held):
    monkeypatch.setattr('serving.server.IDLE_TIMEOUT', 0.1)
    server = running()
    sock = connect(server, request(dict(prompt='abc', max_tokens=3), Connection='close'))
    time.sleep(1.5)  # it is looked every second
    held.set()
    assert b'200 OK' in sock.recv(65536)
    sock.close()


def test_another_name_is_refused_where_names_are_given():
    from serving.app import Limits, make_app
    server = make_server()
    client = TestClient(make_app(server.worker, server.service, Limits(1000, 60.0), hosts=('localhost', '127.0.0.1')))
    for host, status in (('localhost', 200), ('LOCALHOST', 200), ('127.0.0.1:80', 200), ('127.0.0.1:81', 403),
                         ('evil.example', 403), ('localhost.evil.example', 403), ('', 403)):
        assert client.get('/v1/models', headers={'host': host}).status_code == status, host
    server.worker.drain(0)
    server.worker.join(60)


def test_where_the_loops_of_several_have_ended_the_engine_is_closed_all_the_same(serve, held):
    server, closed = serve(), []
    server.engine.close = lambda: closed.append(1)

    def dead(items):
        raise RuntimeError('Event loop is closed')
    for _ in range(2):
        server.worker.submit([([1, 2], SamplingParams(50)), ([1], SamplingParams(50))], dead)
    server.worker.drain(0)
    held.set()
    server.worker.join(60)
    assert closed == [1] and not server.worker.running and not server.worker._choices


# -- what a chat may say ----------------------------------------------------------------------------------------------

USER = {'role': 'user', 'content': 'jab'}
RENDERED = 'acjabdbc'  # by the tests' template {name}c{text}d, up to the reply


def said(client, *messages, **fields):
    return client.post(CHAT, json=dict(messages=messages, seed=1, max_tokens=5) | fields)


def test_what_the_client_library_has_of_a_reply_can_be_sent_back(serve):
    """All of its fields, of which most are null; a reply that was cut off in the midst of the end of its turn; an empty one."""
    server = serve()
    object.__setattr__(server.service, 'template', type(server.service.template)('{name}c{text}de'))
    nulls = dict(refusal=None, tool_calls=None, function_call=None, audio=None, annotations=None, name=None)
    whole = said(server.client, USER, {'role': 'assistant', 'content': 'ab'} | nulls, USER)
    cut = said(server.client, USER, {'role': 'assistant', 'content': 'abd'}, USER)
    assert whole.status_code == 200 and whole.json()['choices'] == cut.json()['choices']
    empty = said(server.client, USER, {'role': 'assistant', 'content': ''}, USER)
    assert empty.json()['usage']['prompt_tokens'] == said(server.client, USER, USER).json()['usage']['prompt_tokens']


def test_blank_lines_of_a_message_are_left_out_or_refused(serve):
    server, letters = serve(), dict(zip('abcdefghijklmnopqrstuv\n', range(23)))
    for name, value in (('tokenizer', CharTokenizer(letters, {i: c for c, i in letters.items()})),
                        ('template', Template('{name}\n{text}\n\n'))):
        object.__setattr__(server.service, name, value)
    blank, plain = ({'role': 'user', 'content': text} for text in ('one\n\nkid\n', 'one\nkid'))
    answers = [said(server.client, message, temperature=0).json() for message in (blank, plain)]
    assert answers[0]['choices'] == answers[1]['choices']
    prompt = 'a\none\nkid\n\nb\n'
    assert [answer['usage']['prompt_tokens'] for answer in answers] == [len(prompt)] * 2
    object.__setattr__(server.service, 'strict', True)
    assert_refused(said(server.client, blank), 400, 'a turn ends at', param='messages[0]')
    assert said(server.client, plain).status_code == 200


@pytest.mark.parametrize('name', [0, '', 'a\nb', 'a\x00'])
def test_names_of_one_line(serve, name):
    response = said(serve().client, USER | {'name': name})
    assert (response.status_code == 400) == (name != '')  # the tests' template can have no name


def test_special_tokens_are_text_in_a_conversation():
    import tiktoken

    from data.tokenizer import GPT2Tokenizer
    from engine.dialogue import Dialogue, Template
    ranks = {bytes([i]): i for i in range(256)}
    tokenizer = GPT2Tokenizer(tiktoken.Encoding('tiny', pat_str=r'\S+|\s+', mergeable_ranks=ranks,
                                                special_tokens={'<|endoftext|>': 256}))
    dialogue = Dialogue(tokenizer, Template('{name}:{text}\n'))
    dialogue.say('a', 'b<|endoftext|>c')
    assert 256 not in dialogue.prompt('<|endoftext|>') and 256 in tokenizer.encode('b<|endoftext|>c')
    assert tokenizer.decode(dialogue.turns[0].ids) == 'a:b<|endoftext|>c\n' and tokenizer.longest == 13
