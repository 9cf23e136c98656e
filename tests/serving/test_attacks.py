"""Clients that hold on to resources are cut off and delay no one else. Contents of chats."""
import socket
import threading
import time
import urllib.request

import pytest

from engine.text.dialogue import Dialogue, Template
from engine.requests.params import SamplingParams
from serving.access import names_this_machine
from serving.replies import Reply
from serving.worker import Ticket
from tests.helpers.serving import TOKENIZER, ending
from tests.serving.conftest import (
    USER, assert_free, assert_refused, eventually, in_background)
from tests.serving.test_server import ask, connect, request


class SlowTokenizer:
    """A tokenizer whose `encode` waits for `go.set()`. waiting: number of calls so far."""

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
def slow(serve):
    """`slow(**settings)` starts a server with a SlowTokenizer."""
    def make(**settings):
        server = serve(**settings)
        server.tokenizer = SlowTokenizer()
        server.set_service(tokenizer=server.tokenizer)
        return server
    return make


def test_a_large_response_is_written_in_a_thread(running, monkeypatch):
    server, gate, entered, plain = running(), threading.Event(), threading.Event(), Reply.document

    def document(reply):
        entered.set()
        assert gate.wait(60)
        return plain(reply)
    monkeypatch.setattr(Reply, 'document', document)
    large = in_background(lambda: ask(server))
    assert entered.wait(60)
    health = f'http://127.0.0.1:{server.port}/health'
    assert urllib.request.urlopen(health, timeout=20).status == 200
    gate.set()
    assert large.result() == 200


def test_few_requests_are_parsed_at_once_and_one_of_a_client(slow):
    server = slow(keys=('one', 'other', 'third'))

    def complete(key, prompt='abc'):
        return server.client.post('/v1/completions', json=dict(prompt=prompt, max_tokens=1),
                                  headers={'authorization': f'Bearer {key}'})
    answers = []
    for key, n, waiting in (('one', 4, 1), ('other', 2, 2), ('third', 1, 2)):
        if key == 'other':  # while all of the first are parsed or wait for that
            assert complete(key, prompt=[1, 2]).status_code == 200
        answers += [in_background(lambda key=key: complete(key)) for _ in range(n)]
        eventually(lambda: server.tokenizer.waiting >= waiting)
        time.sleep(0.1)
        assert server.tokenizer.waiting == waiting
    server.tokenizer.go.set()
    assert [answer.result().status_code for answer in answers] == [200] * 7


def test_the_timeout_includes_parsing(slow):
    server = slow(timeout=0.3)
    response = server.complete()
    assert_refused(response, 504, '0.3 s')
    assert response.headers['x-should-retry'] == 'false'  # OpenAI's client would retry twice
    server.tokenizer.go.set()


def test_nothing_is_parsed_when_no_request_is_accepted(slow, held):
    server = slow(rows=1, max_waiting=0)
    server.worker.submit(Ticket([([1], SamplingParams(2))], lambda items: None))
    assert server.complete().status_code == 429
    server.worker.drain(60)
    assert server.complete().status_code == 503
    assert server.tokenizer.waiting == 0
    held.set()


def test_texts_that_are_too_long_are_not_encoded(slow):
    server, text = slow(), 'a' * 61
    for response in (server.complete(prompt=text), server.chat(USER | {'content': text})):
        assert_refused(response, 400, '61 characters', '60 tokens', code='context_length_exceeded')
    assert server.tokenizer.waiting == 0
    server.tokenizer.go.set()
    response = server.chat(*[USER | {'content': 'a' * 40}] * 100)
    assert_refused(response, 400, 'the conversation has 86 tokens', param='messages')
    assert server.tokenizer.waiting <= 3


def ended(sock) -> bool:
    sock.settimeout(0.01)
    try:
        return sock.recv(65536) == b''
    except TimeoutError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize('address, hosts', [
    ('127.0.0.1', ['localhost', 'LOCALHOST:8000', 'localhost.', '127.0.0.1:80']),
    ('127.0.0.2', ['localhost', '127.0.0.2:81']), ('::1', ['localhost', '[::1]:8000']),
    ('192.168.1.5', ['192.168.1.5:8000'])])
def test_names_of_this_machine(address, hosts):
    for host in [*hosts, f'{socket.gethostname()}:8000']:
        assert names_this_machine(host, address), host
    for host in ('evil.example', 'localhost.evil.example:8000', '', '0.0.0.0', '10.1.2.3', '[::2]',
                 '[', '127.0.0.1.evil.example', f'{address}@evil.example'):
        assert not names_this_machine(host, address), host
    assert names_this_machine('localhost', address) == ('localhost' in hosts)


def test_other_host_names_are_refused_where_no_key_is_needed(serve):
    for keys, status in (((), 403), (('sesame',), 200)):
        client, headers = serve(keys=keys).client, {'authorization': 'Bearer sesame'}
        for path in ('/v1/models', '/nanokv/plan'):
            assert client.get(path, headers=headers).status_code == 200
            other = client.get(path, headers=headers | {'host': 'evil.example'})
            assert other.status_code == status


@pytest.mark.parametrize('shared', [False, True])
def test_the_prompts_of_other_keys_are_not_found(serve, shared):
    server = serve(keys=('one', 'other'), shared_prefix=shared)

    def cached(key):
        answer = server.client.post('/v1/completions', json=dict(prompt='abcdefghij', max_tokens=1),
                                    headers={'authorization': f'Bearer {key}'})
        return answer.json()['usage']['prompt_tokens_details']['cached_tokens']
    assert [cached('one'), cached('one')] == [0, 9]
    assert cached('other') == (9 if shared else 0)
    assert cached('other') == 9


def test_a_client_does_not_take_all_places(serve, held):
    server = serve(rows=2, max_waiting=8, keys=('one', 'other'))

    def complete(key, n):
        return server.client.post('/v1/completions', json=dict(prompt='abc', n=n, stream=n == 1),
                                  headers={'authorization': f'Bearer {key}'})
    first = in_background(lambda: complete('one', 8))
    server.wait_for(8)
    assert_refused(complete('one', 1), 429, 'of yours')
    second = in_background(lambda: complete('other', 2))
    server.wait_for(10)
    refused = complete('other', 1)
    assert_refused(refused, 429, 'too many requests wait')
    assert int(refused.headers['retry-after']) > 0
    held.set()
    assert first.result().status_code == second.result().status_code == 200
    assert_free(server.worker)
    assert not server.worker._num_open


def test_too_many_connections_get_503_until_idle_ones_are_closed(running, monkeypatch):
    monkeypatch.setattr('serving.server.MAX_CONNECTIONS', 3)
    monkeypatch.setattr('serving.server.IDLE_TIMEOUT', 1)
    server = running()
    idle = [connect(server, request(dict(prompt='abc', max_tokens=3))) for _ in range(2)]
    for sock in idle:
        assert b'200 OK' in sock.recv(65536)
    connect(server, b'')
    assert ask(server) == 503
    for sock in idle:
        eventually(lambda: ended(sock))
    eventually(lambda: ask(server) == 200)


def test_large_replies_are_refused(serve):
    server = serve(rows=3, max_waiting=8)
    server.set_service(max_positions=10 ** 6)
    refused = server.complete(n=2, max_tokens=60_000, logprobs=2)
    assert_refused(refused, 400, '2 choices', '60,000 tokens', '360,000', '250,000',
                   param='logprobs')
    assert_refused(server.complete(stop='a' * 1001), 400, '1,000 characters', param='stop')
    assert server.complete(stop='a' * 1000).status_code == 200


def test_a_reply_can_be_sent_back(serve):
    """With all fields that clients add; cut off within the end-of-turn text; empty."""
    server = serve()
    server.set_service(template=Template('{name}c{text}de'))

    def chat(*messages):
        return server.chat(*messages, seed=1, max_tokens=5).json()
    nulls = dict.fromkeys(('refusal', 'tool_calls', 'function_call', 'audio', 'annotations',
                           'name'))
    added = nulls | {'type': 'text', 'provider_specific_fields': {}}
    whole = chat(USER, {'role': 'assistant', 'content': 'ab'} | added, USER)
    cut = chat(USER, {'role': 'assistant', 'content': 'abd'}, USER)
    assert whole['choices'] == cut['choices']
    empty = chat(USER, {'role': 'assistant', 'content': ''}, USER)
    assert empty['usage']['prompt_tokens'] == chat(USER, USER)['usage']['prompt_tokens']


def test_special_tokens_are_text_in_a_conversation():
    _, tokenizer = ending()
    dialogue = Dialogue(tokenizer, Template('{name}:{text}\n'))
    dialogue.say('a', 'b<|endoftext|>c')
    assert 256 not in dialogue.prompt('<|endoftext|>')
    assert 256 in tokenizer.encode('b<|endoftext|>c') and tokenizer.longest == 13
    assert tokenizer.decode(dialogue.turns[0].ids) == 'a:b<|endoftext|>c\n'
