"""What clients send beyond the plain request: values that say nothing, ends of texts, origins."""
import json

import pytest
from openai.types import chat, completion_create_params

from serving import api
from tests.helpers.serving import ending
from tests.serving.conftest import CHAT, COMPLETIONS, USER, expected
from tests.serving.test_answers import pieces, text_of


def test_messages_that_say_nothing_and_system_messages_in_the_middle(serve):
    server = serve(prefix_budget=0)
    nothing = '', ' \n', None, [], [{'type': 'text', 'text': None}]
    for messages, rendered in [
            *(([{'role': 'system', 'content': said}, USER], 'acjabdbc') for said in nothing),
            ([USER, {'role': 'system', 'content': 'hat'}, USER], 'acjabdhatdacjabdbc'),
            ([USER, {'role': 'assistant', 'content': None, 'tool_calls': [], 'refusal': None},
              USER], 'acjabdacjabdbc')]:
        document = server.chat(*messages, seed=1, return_token_ids=True, max_tokens=3).json()
        assert document['usage']['prompt_tokens'] == len(rendered)
        said = expected(rendered, 3, seed=1, stop=('d',))
        assert document['choices'][0]['token_ids'] == said.tokens


OWN = dict(model='tiny', prompt='abc', messages=[USER], n=1, stop=['q'], seed=1, max_tokens=9,
           stream=False, stream_options={}, temperature=1, top_p=1, logprobs=None,
           top_logprobs=0, max_completion_tokens=9)
# the other fields of vLLM 0.32's protocol.py with their defaults
VLLM = dict(
    use_beam_search=False, top_k=0, min_p=0, repetition_penalty=1.0, watermarking=None,
    length_penalty=1.0, stop_token_ids=[], include_stop_str_in_output=False, ignore_eos=False,
    min_tokens=0, skip_special_tokens=True, spaces_between_special_tokens=True,
    truncate_prompt_tokens=None, truncation_side=None, prompt_logprobs=None,
    logprob_token_ids=None, allowed_token_ids=None, bad_words=[], priority=0, request_id='x',
    session_id=None, return_tokens_as_token_ids=None, return_token_ids=None,
    routed_experts_prompt_start=0, return_token_offsets=False, return_mm_kwargs=True,
    cache_salt=None, kv_transfer_params=None, ec_transfer_params=None, vllm_xargs=None,
    repetition_detection=None, thinking_token_budget=None, stream_interval=None,
    structured_outputs=None, response_format={'type': 'text'}, echo=False)
VLLM_COMPLETION = VLLM | dict(prompt_embeds=None, add_special_tokens=True)
VLLM_CHAT = VLLM | dict(
    include_reasoning=True, add_generation_prompt=True, continue_final_message=False,
    add_special_tokens=False, documents=None, chat_template=None, chat_template_kwargs=None,
    media_io_kwargs=None, mm_processor_kwargs=None, return_prompt_text=None)


@pytest.mark.parametrize('path, openais, vllms, own', [
    (COMPLETIONS, completion_create_params, VLLM_COMPLETION, api.COMPLETION),
    (CHAT, chat.completion_create_params, VLLM_CHAT, api.CHAT)])
def test_all_fields_of_openai_and_vllm_are_known(serve, path, openais, vllms, own):
    """They are accepted where they change nothing, each by itself and all together."""
    names = openais.CompletionCreateParamsStreaming.__annotations__.keys()
    names |= openais.CompletionCreateParamsBase.__annotations__.keys()
    known = own.keys() | api.SAMPLING.keys() | api.HARMLESS.keys() | set(api.IGNORED)
    assert len(names) >= 17 and names | vllms.keys() <= known
    fields = {name: (api.HARMLESS.get(name, ()) or ['x' if name in api.IGNORED else None])[0]
              for name in names} | vllms | {name: OWN[name] for name in names & OWN.keys()}
    server = serve()
    needed = {name: OWN[name] for name in fields if name in ('prompt', 'messages', 'seed')}
    plain = server.post(path, needed | {'max_tokens': 9}).json()['choices']
    for given in (fields, *({name: value} for name, value in fields.items() if name != 'seed')):
        answer = server.post(path, needed | {'max_tokens': 9} | given)
        assert answer.status_code == 200 and answer.json()['choices'] == plain, (given, answer.text)


def test_half_a_surrogate_pair_is_a_replacement_character(serve):
    model, tokenizer = ending()
    server = serve(model=model, tokenizer=tokenizer)
    for ask in (lambda text: server.complete(prompt=text, stop=text, user=text),
                lambda text: server.chat(USER | {'content': text}),
                lambda text: server.chat({'role': 'system', 'content': [
                    {'type': 'text', 'text': text}]}, USER)):
        half, whole = ask('a\ud83d').json(), ask('a\ufffd').json()
        assert half['usage']['prompt_tokens'] == whole['usage']['prompt_tokens']


@pytest.mark.parametrize('fields, said', [
    ({}, ('', 'stop', 1)), (dict(ignore_eos=True), ('<|endoftext|>' * 12, 'length', 12))], ids=str)
def test_a_text_ends_with_the_token_for_it(serve, fields, said):
    model, tokenizer = ending()
    server = serve(model=model, tokenizer=tokenizer)
    for ask in (server.complete, lambda **fields: server.chat(USER, **fields)):
        document = ask(temperature=0, max_tokens=12, **fields).json()
        [choice] = document['choices']
        n = document['usage']['completion_tokens']
        assert (text_of(choice), choice['finish_reason'], n) == said
        streamed = pieces(ask(temperature=0, max_tokens=12, stream=True, **fields))
        assert ('endoftext' in json.dumps(streamed)) == bool(fields)


def test_a_seed_of_minus_one_is_random(serve):
    server = serve()
    assert len({server.text(seed=-1, max_tokens=30) for _ in range(3)}) == 3


def test_pages_of_another_origin(serve):
    server, origin = serve(keys=('sesame',), cors='http://page.example'), 'http://page.example'
    ask = {'Access-Control-Request-Method': 'POST',
           'Access-Control-Request-Headers': 'authorization,content-type,x-stainless-os'}
    for source, allowed in ((origin, origin), ('http://other.example', None)):
        preflight = server.client.options(COMPLETIONS, headers=ask | {'Origin': source})
        assert preflight.status_code == (200 if allowed else 400)
        response = server.client.post(COMPLETIONS, json={}, headers={'Origin': source})
        assert response.status_code == 401
        for each in (preflight, response):
            assert each.headers.get('access-control-allow-origin') == allowed
    headers = ask | {'Origin': origin}
    network = {'Access-Control-Request-Private-Network': 'true'}  # Chrome, from a public page
    assert server.client.options(COMPLETIONS, headers=headers | network).status_code == 200
    assert serve().client.options(COMPLETIONS, headers=headers).status_code == 405
