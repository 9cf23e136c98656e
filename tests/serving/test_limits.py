"""What is refused, with its status and OpenAI's error document; and that it disturbs nobody."""
import asyncio
import json
import re
import threading

import pytest

from engine.engine import Engine
from engine.params import SamplingParams
from tests.helpers.serving import TOKENIZER, alone, model_of
from tests.serving.conftest import LONGEST, Asgi, assert_free, eventually

COMPLETIONS, CHAT = '/v1/completions', '/v1/chat/completions'
USER = {'role': 'user', 'content': 'jab'}


def assert_refused(response, status, *named, param=Ellipsis, code=Ellipsis):
    error = response.json()['error']
    assert response.status_code == status and set(error) == {'message', 'type', 'param', 'code'}, response.text
    assert all(text in error['message'] for text in named) and '\n' not in error['message'], error
    assert param in (Ellipsis, error['param']) and code in (Ellipsis, error['code']), error


WRONG = [
    (dict(prompt='abc', bogus=1), 'bogus', "unknown field 'bogus'"),
    (dict(prompt='abc', messages=[USER]), 'messages', 'unknown'),
    (dict(prompt='abc', max_token=5), 'max_token',
     "unknown field 'max_token', did you mean 'max_tokens'?"),
    (dict(prompt='abc', maxTokens=5), 'maxTokens', "did you mean 'max_tokens'?"),
    (dict(), 'prompt', 'missing'), (dict(prompt=None), 'prompt', 'missing'), (dict(prompt=5), 'prompt', '5'),
    (dict(prompt=[]), 'prompt', 'no tokens'), (dict(prompt=''), 'prompt', 'no tokens'),
    (dict(prompt=[[]]), 'prompt', 'no tokens'),
    (dict(prompt=[1.5]), 'prompt', '[1.5]'), (dict(prompt=[True]), 'prompt', 'True'),
    (dict(prompt=['a', 1]), 'prompt', "['a', 1]"),
    (dict(prompt=[['a']]), 'prompt', "['a']"), (dict(prompt={'a': 1}), 'prompt', 'must be a text'),
    (dict(prompt=[23]), None, 'token 23'), (dict(prompt=[-1]), None, 'token -1'), (dict(prompt=[10 ** 30]), None, 'token 1000'),
    (dict(prompt='abX'), 'prompt', "'X'"), (dict(prompt='ab\ud800'), 'prompt', 'not a text'),
    (dict(prompt='a' * (LONGEST + 1)), 'prompt', '61 characters'), (dict(prompt=[0] * (LONGEST + 1)), 'prompt', '61 tokens'),
    (dict(prompt='a' * 50, max_tokens=12), 'max_tokens', '60 positions'), (dict(prompt='a', max_tokens=0), 'max_tokens', '=0'),
    (dict(prompt='a', max_tokens='5'), 'max_tokens', "'5'"), (dict(prompt='a', max_tokens=True), 'max_tokens', 'True'),
    (dict(prompt='a', max_tokens=1.0), 'max_tokens', 'integer'),
    (dict(prompt='a', max_tokens=10 ** 400), 'max_tokens', 'at most'),
    (dict(prompt='a', max_completion_tokens=-3), 'max_completion_tokens', 'max_completion_tokens=-3'),
    (dict(prompt='a', max_tokens=3, max_completion_tokens=3), 'max_tokens', 'one of them'),
    (dict(prompt='a', temperature=-1), 'temperature', '-1'), (dict(prompt='a', temperature='hot'), 'temperature', "'hot'"),
    (dict(prompt='a', top_p=0), 'top_p', '0'), (dict(prompt='a', top_p=1.1), 'top_p', '1.1'),
    (dict(prompt='a', top_k=-1), 'top_k', '-1'), (dict(prompt='a', min_p=1), 'min_p', '1'),
    (dict(prompt='a', repetition_penalty=0), 'repetition_penalty', '0'), (dict(prompt='a', seed='x'), 'seed', "'x'"),
    (dict(prompt='a', seed=2 ** 64), 'seed', 'below 2**64'), (dict(prompt='a', n=0), 'n', 'n=0'),
    (dict(prompt='a', n=12), 'n', '12'),
    (dict(prompt=['a'] * 4, n=3), 'n', '12 choices'), (dict(prompt=['a'] * 129), 'prompt', '129 prompts'),
    (dict(prompt='a', n=1.0), 'n', '1.0'), (dict(prompt='a', stop=''), 'stop', 'at least one'),
    (dict(prompt='a', stop=5), 'stop', '5'),
    (dict(prompt='a', stop=['a', 1]), 'stop', 'list of texts'), (dict(prompt='a', stop=['a'] * 17), 'stop', '17'),
    (dict(prompt='a', logprobs=21), 'logprobs', '21'), (dict(prompt='a', logprobs=True), 'logprobs', 'True'),
    (dict(prompt='a', stream='yes'), 'stream', "'yes'"), (dict(prompt='a', stream_options={}), None, None),
    (dict(prompt='a', stream_options={'include_usage': True}), 'stream_options', 'stream=true'),
    (dict(prompt='a', stream=True, stream_options={'x': 1}), 'stream_options', "'x'"),
    (dict(prompt='a', stream=True, stream_options={'include_usage': 1}), 'stream_options', '1'),
    (dict(prompt='a', frequency_penalty=0.5), 'frequency_penalty', '0.5'), (dict(prompt='a', echo=True), 'echo', 'True'),
    (dict(prompt='a', logit_bias={'5': 1}), 'logit_bias', 'not supported'), (dict(prompt='a', best_of=3), 'best_of', '3'),
    (dict(prompt='a', suffix='b'), 'suffix', "'b'"),
]
WRONG_CHATS = [
    (dict(), 'messages', 'None'), (dict(messages=[]), 'messages', '[]'), (dict(messages='hi'), 'messages', "'hi'"),
    (dict(messages=[USER], prompt='a'), 'prompt', 'unknown'), (dict(messages=['hi']), 'messages[0]', "'hi'"),
    (dict(messages=[USER, {'role': 'tool', 'content': 'a'}]), 'messages[1]', "'tool'"),
    (dict(messages=[{'role': ['user'], 'content': 'a'}]), 'messages[0]', 'role'),
    (dict(messages=[{'role': 'user'}]), 'messages[0]', 'None is not a text'),
    (dict(messages=[{'role': 'user', 'content': 5}]), 'messages[0]', '5 is not'),
    (dict(messages=[{'role': 'user', 'content': [{'type': 'image_url'}]}]), 'messages[0]', 'parts of type text'),
    (dict(messages=[{'role': 'user', 'content': ['a']}]), 'messages[0]', 'parts of type text'),
    (dict(messages=[USER | {'bogus': 1}]), 'messages[0]', 'bogus'),
    (dict(messages=[USER | {'name': 5}]), 'messages[0]', 'name=5'),
    (dict(messages=[USER | {'name': 'd'}]), 'messages[0]', "name='d'"),
    (dict(messages=[USER | {'name': 'Q'}]), 'messages[0]', "'Q'"),
    (dict(messages=[USER, {'role': 'system', 'content': 'a'}]), 'messages[1]', 'before all others'),
    (dict(messages=[{'role': 'user', 'content': 'adb'}]), 'messages[0]', 'a turn ends at'),
    (dict(messages=[{'role': 'user', 'content': 'Hi'}]), 'messages[0]', "'H'"),
    (dict(messages=[{'role': 'system', 'content': 'Hi'}]), 'messages[0]', "'H'"),
    (dict(messages=[USER] * 10), 'messages', '62 tokens'), (dict(messages=[USER] * 9, max_tokens=6), 'max_tokens', '56 prompt'),
    (dict(messages=[USER], logprobs=1), 'logprobs', '1'), (dict(messages=[USER], top_logprobs=2), 'top_logprobs', 'requires'),
    (dict(messages=[USER], logprobs=True, top_logprobs=21), 'top_logprobs', '21'),
    (dict(messages=[USER], tools=[{'type': 'function'}]), 'tools', 'not supported'),
    (dict(messages=[USER], response_format={'type': 'json_object'}), 'response_format', 'not supported'),
    (dict(messages=[USER], stop=''), 'stop', 'at least one'),
]


def test_wrong_fields_are_named(serve):
    server = serve()
    for path, cases in ((COMPLETIONS, WRONG), (CHAT, WRONG_CHATS)):
        for document, param, named in cases:
            for more in ({}, {'stream': True}) if named and 'stream' not in ''.join(document) else ({},):
                response = server.client.post(path, content=json.dumps(document | more),
                                              headers={'content-type': 'application/json'})
                if named is None:
                    assert response.status_code == 200
                else:
                    assert_refused(response, 400, named, param=param)
    assert server.client.post(COMPLETIONS, json=dict(prompt='abc', model='other')).status_code == 404
    response = server.client.post(CHAT, json=dict(messages=[USER], model=5))
    assert_refused(response, 404, '5', param='model', code='model_not_found')
    assert_free(server.worker)


@pytest.mark.parametrize('body', [b'', b'{', b'[1]', b'"abc"', b'null', b'5', b'\xff\xfe', b'{"prompt": "\xff"}', b'[' * 5000,
                                  b'{"n": ' + b'9' * 5000 + b'}', b'{"prompt": NaN}', b'{"temperature": NaN, "prompt": "a"}',
                                  b'{"temperature": 1e999, "prompt": "a"}', b'{"\\ud800": 1}'],
                         ids=lambda body: repr(body[:12]))
def test_bodies_that_are_no_request(serve, body):
    client = serve().client
    for path in (COMPLETIONS, CHAT):
        assert_refused(client.post(path, content=body, headers={'content-type': 'application/json'}), 400)


def test_bodies_of_another_type_or_too_large(serve):
    client = serve(max_body=200).client
    body, kind = b'{"prompt": "abc"}', {'content-type': 'application/json'}
    for headers in ({}, {'content-type': 'text/plain'}, {'content-type': 'application/x-www-form-urlencoded'}):
        assert_refused(client.post(COMPLETIONS, content=body, headers=headers), 415, 'application/json')
    other = {'content-type': 'Application/JSON; charset=utf-8'}
    assert client.post(COMPLETIONS, content=body, headers=other).status_code == 200
    for content in (body + b' ' * 200, iter([body, b' ' * 100, b' ' * 100])):
        assert_refused(client.post(COMPLETIONS, content=content, headers=kind), 413, '200 bytes')
    assert client.post(COMPLETIONS, content=body + b' ' * (200 - len(body)), headers=kind).status_code == 200


def test_routes_and_methods(serve):
    client = serve().client
    assert_refused(client.get('/nowhere'), 404, 'GET /nowhere')
    assert_refused(client.post('/v1/embeddings', json={}), 404)
    assert_refused(client.post(COMPLETIONS + '/', json={}), 404)
    for method, path in (('GET', COMPLETIONS), ('PUT', CHAT), ('DELETE', '/v1/models'), ('POST', '/health'),
                         ('POST', '/metrics')):
        response = client.request(method, path)
        assert_refused(response, 405)
        assert response.headers['allow']


def test_keys(serve):
    server = serve(keys=('sesame', 'open'))
    for header in (None, 'sesame', 'Bearer', 'Bearer ', 'Bearer sesam', 'Bearer sesamee', 'Basic sesame', 'Bearer s\xe9same'):
        headers = {} if header is None else {'authorization': header.encode('latin-1')}
        for method, path in (('POST', COMPLETIONS), ('POST', CHAT), ('GET', '/v1/models'), ('GET', '/metrics'),
                             ('GET', '/none')):
            response = server.client.request(method, path, headers=headers)
            assert_refused(response, 401, 'a key is needed', code='invalid_api_key')
            assert response.headers['www-authenticate'] == 'Bearer'
        for path in ('/health', '/'):  # the page asks for the key
            assert server.client.get(path, headers=headers).status_code == 200
    for header in ('Bearer sesame', 'bearer open', 'Bearer  open'):
        assert server.client.post(COMPLETIONS, json=dict(prompt='a'), headers={'authorization': header}).status_code == 200


# -- too much, too long, gone -----------------------------------------------------------------------------------------

def in_background(call):
    """A thread that does so, with `result`."""
    thread = threading.Thread(target=lambda: setattr(thread, 'result', call()))
    thread.start()
    return thread


def test_too_many_are_told_to_come_again(serve, held):
    server = serve(rows=2, max_waiting=3)
    first = in_background(lambda: server.client.post(COMPLETIONS, json=dict(prompt='abc', n=4)))
    eventually(lambda: server.worker._num_open == 4)
    response = server.client.post(COMPLETIONS, json=dict(prompt='abc', n=2, stream=True))
    assert_refused(response, 429, 'try again')
    assert int(response.headers['retry-after']) > 0
    last = in_background(lambda: server.client.post(COMPLETIONS, json=dict(prompt='abc')))
    eventually(lambda: server.worker._num_open == 5)
    assert server.client.post(COMPLETIONS, json=dict(prompt='abc')).status_code == 429
    held.set()
    for thread in (first, last):
        thread.join()
        assert thread.result.status_code == 200
    assert_free(server.worker)
    assert server.client.post(COMPLETIONS, json=dict(prompt='abc', n=5)).status_code == 200


def test_what_takes_too_long_is_cancelled(serve, held):
    server = serve(timeout=0.05)
    for stream in (False, True):
        assert_refused(server.client.post(COMPLETIONS, json=dict(prompt='abc', stream=stream)), 504, '0.05 s')
    held.set()
    assert_free(server.worker)
    assert server.metrics.registry.get_sample_value('nanokv_request_seconds_count') == 0


def test_a_stream_that_takes_too_long_ends_with_an_error(serve, monkeypatch):
    plain, gate, steps = Engine.step, threading.Event(), []

    def step(engine):
        steps.append(1)
        if len(steps) == 4:
            gate.wait(60)
        return plain(engine)
    monkeypatch.setattr(Engine, 'step', step)
    server = serve(timeout=0.5)
    response = server.client.post(COMPLETIONS, json=dict(prompt='abc', stream=True))
    gate.set()
    *said, last = [json.loads(event[6:]) for event in response.text.split('\n\n')[:-1]]
    assert response.status_code == 200 and last['error']['type'] == 'timeout_error' and 0 < len(said) <= 3
    assert re.search(r' 200: TTFT .*, not done within 0.5 s: cancelled$', server.logged[0])
    assert_free(server.worker)


def test_a_body_that_does_not_come(serve):
    server = serve(timeout=0.05)

    async def scenario():
        request = Asgi(server.app, COMPLETIONS, b'{')
        request.bodies.append(b'}')
        plain = request.receive

        async def receive():
            if len(request.bodies) == 1:
                await asyncio.sleep(60)
            return await plain()
        request.receive = receive
        await request.run()
        return request.sent
    assert asyncio.run(scenario())[0]['status'] == 408


@pytest.mark.parametrize('stream', [True, False])
def test_whoever_leaves_is_cancelled(serve, held, stream):
    """While it waits, and while it runs; with all of its choices."""
    server = serve(rows=1)

    async def scenario():
        body = json.dumps(dict(prompt='abcdefgh', max_tokens=50, n=3, stream=stream)).encode()
        requests = [Asgi(server.app, COMPLETIONS, body) for _ in range(2)]
        tasks = [asyncio.create_task(request.run()) for request in requests]
        while server.worker._num_open < 6 or not held.in_step.is_set():
            await asyncio.sleep(0.005)
        for request in requests:
            request.gone.set()
        await asyncio.gather(*tasks)
        return [request.sent for request in requests]
    assert asyncio.run(scenario()) == [[], []]
    held.set()
    assert_free(server.worker)
    assert all(' 499: client left, ' in line for line in server.logged) and len(server.logged) == 2
    assert server.metrics.registry.get_sample_value('nanokv_tokens_generated_total') <= 1  # of the step that was held
    labels = dict(route=COMPLETIONS, status='499')
    assert server.metrics.registry.get_sample_value('nanokv_requests_total', labels) == 2


def test_whoever_leaves_in_the_midst_of_a_stream_is_cancelled(serve):
    server, others = serve(rows=2), alone(model_of('full stack'), 'abc', SamplingParams(12, seed=1), tokenizer=TOKENIZER)

    async def scenario():
        body = json.dumps(dict(prompt='abcdefgh', max_tokens=50, n=2, stream=True)).encode()
        request = Asgi(server.app, COMPLETIONS, body)
        plain = request.send

        async def send(message):
            await plain(message)
            if len(request.sent) == 3:
                request.gone.set()
        request.send = send
        await request.run()
        return request.sent
    beside = in_background(lambda: server.client.post(COMPLETIONS, json=dict(prompt='abc', seed=1)))
    sent = asyncio.run(scenario())
    assert len(sent) >= 3 and all(message.get('more_body', True) for message in sent)
    beside.join()
    assert beside.result.json()['choices'][0]['text'] == others.text
    assert_free(server.worker)


def test_an_event_loop_that_has_ended_is_no_harm(serve, held):
    """Its tasks were killed, and none could say so to the worker."""
    server = serve()

    def dead(items):
        raise RuntimeError('Event loop is closed')
    server.worker.submit([([1, 2], SamplingParams(50)), ([1], SamplingParams(50))], dead)
    held.set()
    assert_free(server.worker)
    assert server.client.post(COMPLETIONS, json=dict(prompt='abc')).status_code == 200


def test_with_nothing_to_do_no_step_is_made(serve, monkeypatch):
    steps, plain = [], Engine.step
    monkeypatch.setattr(Engine, 'step', lambda engine: steps.append(1) or plain(engine))
    server = serve()
    for _ in range(2):
        server.client.post(COMPLETIONS, json=dict(prompt='abc', max_tokens=5))
        assert_free(server.worker)
        n = len(steps)
        assert not server.worker._thread.join(0.2) and len(steps) == n <= 20
