"""Responses, complete or streamed, equal what the engine itself generates; metrics; the log."""
import json
import re
import time

import pytest

from engine.requests.params import sample_seed
from tests.helpers.serving import TOKENIZER
from tests.serving.conftest import LONGEST, USER, assert_free, expected

PARTS = [{'type': 'text', 'text': 'o'}, {'type': 'text', 'text': 'n'}]
MESSAGES = [{'role': 'system', 'content': 'hat'}, {'role': 'user', 'content': 'jab'},
            {'role': 'assistant', 'content': 'efg'}, {'role': 'user', 'content': PARTS}]
RENDERED = 'hatdacjabdbcefgdacondbc'


def pieces(response):
    """The JSON documents of a stream."""
    assert response.status_code == 200 and response.headers['content-type'] == 'text/event-stream'
    *events, end = response.text.split('\n\n')
    assert end == '' and events.pop() == 'data: [DONE]'
    assert all(event.startswith('data: ') for event in events)
    return [json.loads(event[6:]) for event in events]


def text_of(choice):
    """The text of a choice of either route, or of a piece of it in a stream."""
    if 'text' in choice:
        return choice['text']
    return choice.get('message', choice.get('delta')).get('content', '')


@pytest.mark.parametrize('fields, params', [
    (dict(max_tokens=20, temperature=0), dict(n=20, temperature=0)),
    (dict(seed=7, temperature=0.9, top_p=0.8), dict(seed=7, temperature=0.9, top_p=0.8)),
    (dict(seed=8, top_k=4, min_p=0.02, repetition_penalty=1.3),
     dict(seed=8, top_k=4, min_p=0.02, repetition_penalty=1.3)),
    (dict(seed=9, max_tokens=30, stop=['d', 'ef']), dict(seed=9, n=30, stop=('d', 'ef'))),
    (dict(seed=3, temperature=None, n=None, stop=['', ''], user='me', frequency_penalty=0,
          best_of=1, echo=False, unknown=None, other=[], tools=None, suffix='', min_tokens=0,
          skip_special_tokens=True, top_k=-1), dict(seed=3)),
    (dict(seed=3, max_completion_tokens=9, use_beam_search=False, length_penalty=1.0,
          early_stopping=False, request_id='x', include_stop_str_in_output=False),
     dict(seed=3, n=9)),
    (dict(seed=3.0, n=1.0, max_tokens=9.0, top_k=4.0), dict(seed=3, n=9, top_k=4)),
    (dict(seed=3, stop='\ud83d', user='\ud83d', max_tokens=10 ** 6), dict(seed=3, n=LONGEST - 5)),
    (dict(seed=9, max_tokens=30, stop_token_ids=[3]), dict(seed=9, n=30, stop_tokens=(3,))),
], ids=str)
def test_a_completion_is_the_engines(serve, fields, params):
    server, said = serve(), expected('abcabc', **params)
    document = server.complete(model='tiny', prompt='abcabc', **fields).json()
    [choice] = document['choices']
    assert choice == {'index': 0, 'text': said.text, 'logprobs': None,
                      'finish_reason': said.finish_reason}
    n = len(said.tokens)
    assert document['usage'] == {'prompt_tokens': 6, 'completion_tokens': n, 'total_tokens': 6 + n,
                                 'prompt_tokens_details': {'cached_tokens': 0}}
    assert (document['object'], document['model']) == ('text_completion', 'tiny')
    assert document['id'].startswith('cmpl-')
    streamed = pieces(server.complete(prompt='abcabc', stream=True, **fields))
    assert ''.join(piece['choices'][0]['text'] for piece in streamed) == said.text
    reasons = [piece['choices'][0]['finish_reason'] for piece in streamed]
    assert reasons == [None] * (len(streamed) - 1) + [said.finish_reason]
    assert all('usage' not in piece for piece in streamed)
    assert len({piece['id'] for piece in streamed}) == 1
    assert_free(server.worker)


def test_token_ids_and_several_prompts(serve):
    server, ids = serve(), TOKENIZER.encode('abc')

    def texts(prompt, **fields):
        choices = server.complete(prompt=prompt, seed=5, **fields).json()['choices']
        assert [choice['index'] for choice in choices] == list(range(len(choices)))
        return [choice['text'] for choice in choices]
    one, other = expected('abc', seed=5).text, expected('ded', seed=5).text
    second = expected('abc', seed=sample_seed(5, 1)).text
    assert len({one, other, second}) == 3
    assert texts(ids) == [one] and texts(['abc', 'ded']) == [one, other]
    assert texts([ids, TOKENIZER.encode('ded')]) == [one, other]
    last = expected('ded', seed=sample_seed(5, 1)).text
    assert texts(['abc', 'ded'], n=2, best_of=1) == [one, second, other, last]


def test_log_probabilities(serve):
    server, said = serve(), expected('abc', seed=2, logprobs=2, stop=('o',))
    fields = dict(seed=2, logprobs=2, stop='o')
    whole = server.complete(**fields).json()['choices'][0]['logprobs']
    assert whole['tokens'] == [TOKENIZER.decode([token]) for token in said.tokens]
    assert whole['token_logprobs'] == pytest.approx([entry.logprob for entry in said.logprobs])
    assert whole['text_offset'] == list(range(len(said.tokens)))
    sampled = 0
    for top, entry in zip(whole['top_logprobs'], said.logprobs, strict=True):
        best = [TOKENIZER.decode([token]) for token, _ in entry.top]
        own = TOKENIZER.decode([entry.token])
        assert list(top) == best + [own] * (own not in best)
        assert list(top.values()) == sorted(top.values(), reverse=True)
        sampled += own not in best
    assert sampled
    streamed = [piece['choices'][0]['logprobs']
                for piece in pieces(server.complete(**fields, stream=True))]
    for name in ('tokens', 'text_offset'):
        assert [x for piece in streamed for x in piece[name]] == whole[name]
    [choice] = server.complete(**fields | dict(logprobs=0)).json()['choices']
    assert choice['logprobs']['top_logprobs'] == [
        {text: pytest.approx(logprob)}
        for text, logprob in zip(whole['tokens'], whole['token_logprobs'])]


def test_a_chat_is_rendered_by_the_template_and_ends_with_the_turn(serve):
    server = serve()
    said = expected(RENDERED, 30, seed=1, stop=('d',))
    assert said.finish_reason == 'stop'
    fields = dict(model='tiny', seed=1, max_completion_tokens=30)
    document = server.chat(*MESSAGES, **fields).json()
    [choice] = document['choices']
    assert choice['message'] == {'role': 'assistant', 'content': said.text, 'refusal': None}
    assert (choice['finish_reason'], document['object']) == ('stop', 'chat.completion')
    assert document['usage']['prompt_tokens'] == len(RENDERED)
    streamed = pieces(server.chat(*MESSAGES, **fields, stream=True))
    deltas = [piece['choices'][0]['delta'] for piece in streamed]
    assert deltas[0] == {'role': 'assistant', 'content': ''} and deltas[-1] == {}
    assert streamed[0]['object'] == 'chat.completion.chunk'
    assert_free(server.worker)
    said = expected('ecjabdbc', 30, seed=1, stop=('q', 'd'))
    document = server.chat(USER | {'name': 'e'}, seed=1, max_tokens=30, stop='q').json()
    assert document['choices'][0]['message']['content'] == said.text


def held_back(said):
    """A stop text that begins like what was said, and goes on in another way."""
    return [a + ('a' if b != 'a' else 'b') for a, b in zip(said.text[:4], said.text[1:])]


@pytest.mark.parametrize('chat', [False, True])
def test_token_ids_of_a_reply_are_the_engines(serve, chat):
    server, prompt = serve(), RENDERED if chat else 'abcabc'
    stop = held_back(expected(prompt, seed=5))
    said = [expected(prompt, 30, stop=(*stop, 'd') if chat else tuple(stop),
                     seed=sample_seed(5, k)) for k in range(2)]
    assert said[0].tokens != said[1].tokens
    fields = dict(seed=5, n=2, max_tokens=30, stop=stop, return_token_ids=True)

    def ask(**more):
        if chat:
            return server.chat(*MESSAGES, **fields, **more)
        return server.complete(prompt=prompt, **fields, **more)
    document = ask().json()
    streamed = pieces(ask(stream=True, stream_options={'include_usage': True}))
    usage = document['usage']['completion_tokens']
    assert usage == sum(len(completion.tokens) for completion in said)
    assert usage == streamed[-1]['usage']['completion_tokens']
    for k, completion in enumerate(said):
        whole = document['choices'][k]
        mine = [choice for piece in streamed for choice in piece['choices'] if choice['index'] == k]
        assert ''.join(map(text_of, mine)) == text_of(whole) == completion.text
        assert [c['finish_reason'] for c in mine if c['finish_reason']] == [
            whole['finish_reason']] == [completion.finish_reason]
        # each token when it comes, whatever its text waits for
        assert [c['token_ids'] for c in mine if 'token_ids' in c] == [
            [token] for token in whole['token_ids']]
        assert whole['token_ids'] == completion.tokens
    fields['return_token_ids'] = False
    plain = [choice for piece in pieces(ask(stream=True)) for choice in piece['choices']]
    assert not any('token_ids' in choice for choice in [*plain, *ask().json()['choices']])
    # nothing is sent for a token whose text waits, except the beginning and the end
    assert [text_of(choice) for choice in plain].count('') <= 4


def test_ignore_eos_goes_on_past_the_end_of_a_turn(serve):
    server, fields = serve(), dict(seed=1, max_tokens=30, ignore_eos=True)
    turn, on = expected(RENDERED, 30, seed=1, stop=('d',)), expected(RENDERED, 30, seed=1)
    assert turn.finish_reason == 'stop' and 'd' in on.text and on.text.startswith(turn.text)
    # stop texts of the request still end it, and a completion has no turn that ends
    for more, said in (({}, on), (dict(stop='d'), turn)):
        for found in (server.chat(*MESSAGES, **fields, **more),
                      server.complete(prompt=RENDERED, **fields, **more)):
            [choice] = found.json()['choices']
            assert (text_of(choice), choice['finish_reason']) == (said.text, said.finish_reason)
    assert server.text(prompt=RENDERED, seed=1, max_tokens=30) == on.text


def test_lengths_are_cut_to_what_there_is_room_for(serve):
    server = serve()
    for n_prompt, wanted in ((10, 12), (LONGEST - 4, 5), (LONGEST, 1)):
        usage = server.complete(prompt='a' * n_prompt).json()['usage']
        assert usage['completion_tokens'] == wanted
    choices = server.complete(prompt=['a' * LONGEST, 'abc'], max_tokens=99).json()['choices']
    assert [len(choice['text']) for choice in choices] == [1, LONGEST - 2]
    assert {choice['finish_reason'] for choice in choices} == {'length'}


def test_models_and_health(serve):
    server = serve()
    assert [model['id'] for model in server.client.get('/v1/models').json()['data']] == ['tiny']
    model = server.client.get('/v1/models/tiny').json()
    assert (model['id'], model['created']) == ('tiny', server.service.created)
    assert abs(model['created'] - time.time()) < 600
    assert server.client.get('/v1/models/other').status_code == 404
    assert server.client.get('/health').json() == {'status': 'ok'}
    server.worker.drain(0)
    assert server.client.get('/health').status_code == 503
    assert server.complete().status_code == 503


def test_the_page(serve):
    response = serve().client.get('/')
    assert response.status_code == 200
    assert response.headers['content-type'] == 'text/html; charset=utf-8'
    assert response.headers['content-security-policy'].startswith(
        "default-src 'none'; connect-src 'self'; img-src data:; script-src 'sha256-")
    for unsafe in ('http:', 'https:', 'innerHTML', 'insertAdjacent', 'document.write', 'eval('):
        assert unsafe not in response.text


def test_metrics_count_what_was_done(serve):
    server = serve()
    assert server.metric('tokens_generated_total') == 0
    usages = [server.complete(prompt='abcdefghijklmnopq', temperature=0, max_tokens=5).json()[
        'usage'] for _ in range(3)]
    cached = [usage['prompt_tokens_details']['cached_tokens'] for usage in usages]
    assert cached == [0, 16, 16]  # whole blocks of the prefix cache
    server.complete(prompt='Q')
    server.client.get('/nowhere')
    server.client.get('/nowhere/else')
    assert_free(server.worker)
    for name, labels, value in [
            ('requests_total', dict(route='/v1/completions', status='200'), 3),
            ('requests_total', dict(route='/v1/completions', status='400'), 1),
            ('requests_total', dict(route='other', status='404'), 2),
            ('tokens_generated_total', {}, 15), ('prompt_tokens_total', {}, 51),
            ('prompt_tokens_cached_total', {}, 32), ('prefix_hit_rate', {}, 32 / 51),
            ('running_requests', {}, 0), ('waiting_requests', {}, 0), ('ttft_seconds_count', {}, 3),
            ('request_seconds_count', {}, 3),
            ('kv_held_bytes', {}, server.engine.cache.held_nbytes),
            ('prefix_store_bytes', dict(where='host'), server.engine.prefix.nbytes),
            ('failed_steps_total', {}, 0)]:
        assert server.metric(name, **labels) == value, name
    assert server.engine.prefix.nbytes > 0 and 0 < server.metric('request_seconds_sum') < 600
    assert '\nnanokv_tokens_generated_total 15.0\n' in server.client.get('/metrics').text


def test_the_log_has_a_line_for_each_request_with_little_of_what_clients_send(serve):
    server = serve(keys=('sesame',))
    client, key = server.client, {'authorization': 'Bearer sesame'}
    ask = dict(prompt='abcdefghijklmnopq', temperature=0, max_tokens=3)
    for document in (ask, ask | dict(n=2, stream=True), ask | {'secret' * 50: 1},
                     dict(prompt='ab"Q secret \N{SNOWMAN}')):
        client.post('/v1/completions', json=document, headers=key)
    client.get('/a%0AGET /b%1B%C5%BC', headers=key)
    client.get('/' + 'x' * 10_000, headers=key)
    client.request('X' * 10_000, '/v1/models')
    tokens = (r'17 prompt tokens \({} cached\), {} completion tokens, '
              r'TTFT \d\.\d{{3}} s, \d\.\d{{3}} s, length')
    for line, wanted in zip(server.logged, [
            'POST /v1/completions 200: ' + tokens.format(0, 3),
            'POST /v1/completions 200: ' + tokens.format(16, 6),
            r'POST /v1/completions 400: \d\.\d{3} s, unknown_field',
            r'POST /v1/completions 400: \d\.\d{3} s, invalid_request_error',
            r'GET /a\\nGET /b\\x1b\\u017c 404: \d\.\d{3} s, invalid_request_error',
            r'GET /x{195} 404: \d\.\d{3} s, invalid_request_error',
            r'X{200} 401: \d\.\d{3} s, invalid_api_key'], strict=True):
        assert re.fullmatch(r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d testclient ' + wanted, line), line
