"""Refused requests: their status and error document, and that other requests are unaffected."""
import json
import re

from engine.engine import Engine
from engine.requests.params import SamplingParams, whole
from serving.worker import Ticket
from tests.serving.conftest import (
    CHAT, COMPLETIONS, LONGEST, USER, assert_free, assert_refused)

JSON = {'content-type': 'application/json'}
# (fields in addition to prompt='a', the field in the error, part of the message)
WRONG = [
    (dict(max_token=5), 'max_token', "unknown field 'max_token', did you mean 'max_tokens'?"),
    (dict(prompt=5), 'prompt', '5'),
    *((dict(prompt=prompt), 'prompt', 'must be a text') for prompt in ([], '', None)),
    (dict(prompt=[[]]), 'prompt', 'no tokens'),
    (dict(prompt=[True]), 'prompt', 'True'),
    (dict(prompt=['a', 1]), 'prompt', "['a', 1]"),
    (dict(prompt=[23]), 'prompt', 'token 23'),
    (dict(prompt=['a', 'b'] + ['c'] * 10), 'prompt', '12 choices'),
    (dict(prompt=[[0], [0, -1]]), 'prompt', 'token -1'),
    (dict(prompt=[10 ** 30]), 'prompt', 'token 1000'),
    (dict(prompt='abX'), 'prompt', "'X'"),
    (dict(prompt='ab\ud800'), 'prompt', '\ufffd'),
    (dict(prompt=[1.5]), 'prompt', '1.5'),
    (dict(prompt='a' * (LONGEST + 1)), 'prompt', '61 characters'),
    (dict(prompt=[0] * (LONGEST + 1)), 'prompt', '61 tokens'),
    (dict(prompt=['a'] * 129), 'prompt', '129 prompts'),
    (dict(max_tokens=0), 'max_tokens', '=0'),
    (dict(max_tokens=10 ** 400), 'max_tokens', 'at most'),
    (dict(max_completion_tokens=-3), 'max_completion_tokens', 'max_completion_tokens=-3'),
    (dict(repetition_penalty=0), 'repetition_penalty', '0'),
    (dict(seed=2 ** 64), 'seed', 'below 2**64'),
    (dict(n=0), 'n', 'n=0'),
    (dict(n=12), 'n', '12'),
    (dict(prompt=['a'] * 4, n=3), 'n', '12 choices'),
    (dict(stop=['a'] * 17), 'stop', '17'),
    (dict(stop_token_ids=[-1]), 'stop_token_ids', 'stop_token_ids=[-1]'),
    (dict(stop_token_ids=[99]), 'stop_token_ids', 'stop token 99'),
    (dict(stop_token_ids=[1] * 1001, n=9), 'stop_token_ids', '1,001 tokens, at most 1,000'),
    *((dict({name: value}), name, f'{value!r} is not supported: leave it out') for name, value in
      dict(verbosity='high', reasoning_effort='low', prompt_logprobs=0, allowed_token_ids=[1],
           bad_words=['a'], priority=1, cache_salt='x', min_tokens=2, logprob_token_ids=[1],
           structured_outputs={'regex': 'a'}, truncate_prompt_tokens=-1, store=True, echo=True,
           skip_special_tokens=False, frequency_penalty=0.5, logit_bias={'5': 1},
           best_of=3).items()),
    (dict(max_tokens=5, max_completion_tokens=0), 'max_completion_tokens', 'tokens=0'),
    (dict(logprobs=21), 'logprobs', '21'),
    (dict(stream='yes'), 'stream', "'yes'"),
    *((dict({name: value}), name, 'true or false') for name in ('return_token_ids', 'ignore_eos')
      for value in (0, 1.0, 'true', [1], {'a': 1})),
    (dict(stream=False, stream_options={'include_usage': True}), 'stream_options', 'stream=true'),
    (dict(stream=True, stream_options={'x': 1}), 'stream_options', "'x'"),
    (dict(stream=True, stream_options={'continuous_usage_stats': True}), 'stream_options', 'True'),
]
# the same in addition to messages=[USER]
WRONG_CHATS = [
    *((dict(messages=value), 'messages', named)
      for value, named in ((None, 'None'), ([], 'at least one'), ('hi', "'hi'"))),
    (dict(messages=[USER] * 10), 'messages', '62 tokens'),
    (dict(messages=[USER] * 2049), 'messages', '2,049 items: at most 2,048'),
    (dict(top_logprobs=2), 'top_logprobs', 'requires'),
    (dict(logprobs=True, top_logprobs=21), 'top_logprobs', '21'),
    (dict(tools=[{'type': 'function'}]), 'tools', 'not supported'),
    (dict(messages=[USER, {'role': 'tool', 'content': 'a'}]), 'messages[1]', "'tool'"),
]
WRONG_CHATS += [(dict(messages=[message]), 'messages[0]', named) for message, named in [
    ('hi', "'hi'"),
    ({'role': ['user'], 'content': 'a'}, 'role'),
    *((USER | {'content': nothing}, 'the message is empty') for nothing in (None, '', [], ' \n')),
    ({'role': 'user', 'content': 5}, '5 is not'),
    ({'role': 'user', 'content': [{'type': 'image_url'}]}, 'parts of type text'),
    ({'role': 'user', 'content': [{'type': 'text', 'text': 5}]}, '5 is not'),
    (USER | {'bogus': 1}, 'bogus'),
    (USER | {'type': 'image'}, 'image'),
    (USER | {'name': 'a' * 61}, '61 characters'),
    (USER | {'name': 'd'}, "name='d'"),
    (USER | {'name': 0}, '0 is not a text'),
    *((USER | {'name': name}, 'name=') for name in ('a\nb', 'a\x00')),
    (USER | {'name': 'Q'}, "'Q'"),
    ({'role': 'user', 'content': [{'type': 'text', 'text': ''}] * 2049}, '2,049 items'),
    ({'role': 'user', 'content': 'adb'}, 'a turn ends at'),
    ({'role': 'user', 'content': 'Hi'}, "'H'"),
]]


def test_wrong_fields_are_named(serve):
    server = serve(max_body=200_000)
    for path, valid, cases in ((COMPLETIONS, dict(prompt='a'), WRONG),
                               (CHAT, dict(messages=[USER]), WRONG_CHATS)):
        for fields, param, named in cases:
            for document in (valid | fields, {'stream': True} | valid | fields):
                body = json.dumps(document)
                response = server.client.post(path, content=body, headers=JSON)
                assert_refused(response, 400, named, param=param)
    assert server.complete(stream_options={}, max_tokens=1).status_code == 200
    assert server.chat(USER | {'name': ''}, max_tokens=1).status_code == 200
    assert_refused(server.complete(model='other'), 404, 'other')
    assert_refused(server.chat(USER, model=5), 404, '5', param='model', code='model_not_found')
    assert_free(server.worker)


def test_the_items_of_a_list_are_checked_once(serve, monkeypatch):
    """Not for every choice; and not at all if there are too many."""
    checked = []
    monkeypatch.setattr('engine.requests.params.whole', lambda x: checked.append(x) or whole(x))
    server = serve()
    for n_tokens, status, n_checked in ((900, 200, 900), (1001, 400, 0)):
        checked.clear()
        fields = dict(n=9, max_tokens=1, stop_token_ids=[1] * n_tokens)
        assert server.complete(**fields).status_code == status
        assert checked.count(1) - n_checked in range(20)  # and the numbers of other fields


def test_bodies_that_are_no_request(serve):
    client = serve().client
    for body in (b'', b'{', b'[1]', b'"abc"', b'null', b'5', b'\xff\xfe', b'{"prompt": "\xff"}',
                 b'[' * 5000, b'{"n": ' + b'9' * 5000 + b'}', b'{"prompt": NaN}',
                 b'{"temperature": NaN, "prompt": "a"}', b'{"temperature": 1e999, "prompt": "a"}',
                 b'{"\\ud800": 1}'):
        for path in (COMPLETIONS, CHAT):
            assert_refused(client.post(path, content=body, headers=JSON), 400)


def test_many_small_lists_are_refused_unread(serve, recorded):
    read = recorded(json, 'loads', lambda body: body)
    body = b'{"prompt": [' + b'[1],' * 20_000 + b'[1]]}'
    client = serve(max_body=200_000).client
    answer = client.post(COMPLETIONS, content=body, headers=JSON)
    assert_refused(answer, 400, '20,000 lists')
    assert body not in read


def test_bodies_of_another_type_or_too_large(serve):
    client, body = serve(max_body=200).client, b'{"prompt": "abc"}'

    def post(content, kind='application/json'):
        return client.post(COMPLETIONS, content=content, headers={'content-type': kind})
    for kind in ('', 'text/plain', 'application/x-www-form-urlencoded'):
        assert_refused(post(body, kind), 415, 'application/json')
    assert post(body, 'Application/JSON; charset=utf-8').status_code == 200
    for content in (body + b' ' * 200, iter([body, b' ' * 100, b' ' * 100])):
        assert_refused(post(content), 413, '200 bytes')
    assert post(body.ljust(200)).status_code == 200
    assert post(body.ljust(201)).status_code == 413


def test_routes_and_methods(serve):
    client = serve().client
    for method, path, status in (
            ('GET', '/nowhere', 404), ('POST', '/v1/embeddings', 404),
            ('POST', COMPLETIONS + '/', 404), ('GET', COMPLETIONS, 405), ('PUT', CHAT, 405),
            ('DELETE', '/v1/models', 405), ('POST', '/health', 405), ('POST', '/metrics', 405)):
        response = client.request(method, path)
        assert_refused(response, status, f'{method} {path}')
        assert status == 404 or response.headers['allow']


def test_keys(serve):
    client = serve(keys=('sesame', 'open')).client
    for header in (None, 'sesame', 'Bearer', 'Bearer ', 'Bearer sesam', 'Bearer sesamee',
                   'Basic sesame', 'Bearer s\xe9same'):
        headers = {} if header is None else {'authorization': header.encode('latin-1')}
        for method, path in (('POST', COMPLETIONS), ('POST', CHAT), ('GET', '/v1/models'),
                             ('POST', '/nanokv/completions'), ('GET', '/nanokv/plan'),
                             ('POST', '/nanokv/chat/completions'), ('GET', '/metrics'),
                             ('GET', '/none')):
            response = client.request(method, path, headers=headers)
            wrong = header and header.startswith('Bearer s')
            message = 'the key is not valid' if wrong else 'a key is needed'
            assert_refused(response, 401, message, code='invalid_api_key')
            assert response.headers['www-authenticate'] == 'Bearer'
        for path in ('/health', '/'):  # the page asks for the key
            assert client.get(path, headers=headers).status_code == 200
    for header in ('Bearer sesame', 'bearer open', 'Bearer  open'):
        assert client.get('/v1/models', headers={'authorization': header}).status_code == 200


def test_a_timeout_cancels(serve, held):
    server = serve(timeout=0.05)
    for stream in (False, True):
        assert_refused(server.complete(stream=stream), 504, '0.05 s')
    held.set()
    assert_free(server.worker)
    assert server.metric('request_seconds_count') == 0


def test_a_stream_that_times_out_ends_with_an_error(serve, held):
    server = serve(timeout=0.5)
    held.release(3)
    response = server.complete(stream=True)
    held.set()
    *pieces, last = [json.loads(event[6:]) for event in response.text.split('\n\n')[:-1]]
    assert response.status_code == 200 and last['error']['type'] == 'timeout_error'
    assert 0 < len(pieces) <= 3
    assert re.search(r' 200: .*, not done within 0.5 s: cancelled$', server.logged[0])
    assert_free(server.worker)


def test_closed_event_loops_do_no_harm(serve, held):
    """Their tasks are killed before they can cancel anything."""
    server = serve()

    def dead(items):
        raise RuntimeError('Event loop is closed')
    for _ in range(2):
        params = SamplingParams(50)
        server.worker.submit(Ticket([([1, 2], params), ([1], params)], dead))
    held.set()
    assert_free(server.worker)
    assert server.complete().status_code == 200


def test_an_idle_worker_makes_no_step(serve, recorded):
    steps, server = recorded(Engine, 'step', lambda engine: 1), serve()
    for _ in range(2):
        server.complete(max_tokens=5)
        assert_free(server.worker)
        n = len(steps)
        server.worker.join(0.2)
        assert len(steps) == n <= 20
