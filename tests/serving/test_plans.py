"""A server of several plans of one model: which plan a request's model names, and its text."""
import pytest

from engine.requests.params import SamplingParams
from interop.choose import at_plan
from tests.helpers.serving import TOKENIZER, alone, model_of
from tests.serving.browser import drawn, send
from tests.serving.conftest import LONGEST, assert_free, assert_refused, in_background
from training.elastic.plans import plans_of

BASE = model_of('unshared')
SMALLER = 'window_size=3; layer_pattern=LLG, kv_share=AAB, window_size=3'
PLANS = plans_of(SMALLER, BASE.config)
MODELS = [BASE, *(at_plan(BASE, plan).eval() for plan in PLANS[1:])]
TEXT = 'abcdefghijklmnopqrstuvw'
NAMES = ['tiny', 'tiny:30KB', 'tiny:20KB']  # not their own bytes: only what the service says counts


SERVED = dict(zip(NAMES[1:], zip(MODELS[1:], (dict(nbytes=30_000, loss=1.0),
                                               dict(nbytes=20_000, loss=3.0)))))


@pytest.fixture
def server(serve):
    """The losses are not in the order of the bytes."""
    server = serve(model=BASE, plans=SERVED)
    server.set_service(nbytes=40_000, loss=2.0)
    return server


def text_of(i, n=12, **params):
    return alone(MODELS[i], TEXT, SamplingParams(n, **params), tokenizer=TOKENIZER).text


def test_each_plan_answers_as_it_does_alone(server):
    texts = [text_of(i, seed=3) for i in range(3)]
    assert len(set(texts)) == 3
    calls = [(name, in_background(lambda name=name: server.complete(
        prompt=TEXT, model=name, seed=3, max_tokens=12).json())) for name in [None, *NAMES] * 2]
    for name, call in calls:  # at the same time
        answer = call.result()
        assert answer['model'] == (name or 'tiny')
        assert answer['choices'][0]['text'] == texts[NAMES.index(name or 'tiny')]
    assert server.client.get('/metrics').text.count('nanokv_running_requests 0.0') == 1
    for engine in server.engines:
        assert_free(server.worker, engine)


@pytest.mark.parametrize('name, found', [
    ('tiny:20000', 2), ('tiny:29.9KB', 2), ('tiny:30000', 1), ('tiny:39KiB', 1), ('tiny:1GB', 1)])
def test_a_size_names_the_best_plan_within_it(server, name, found):
    answer = server.complete(prompt=TEXT, model=name).json()
    assert answer['model'] == NAMES[found]
    plan = server.client.get('/nanokv/plan', params=dict(model=name)).json()
    assert plan['model'] == NAMES[found] and plan['models'] == NAMES
    assert [slot['capacity'] for slot in plan['slots']] == [
        slot.capacity(LONGEST) for slot in MODELS[found].plan.slots]
    model = server.client.get(f'/v1/models/{name}').json()
    assert model['id'] == NAMES[found]


@pytest.mark.parametrize('name', [
    'tiny:19KB', 'tiny:', 'tiny:x', 'other', 'other:30KB', 'tiny:0', 'small', ':30KB',
    'tiny:' + '9' * 15_000, 'tiny:9e99999', 7, [1], {'a': 1}])
def test_other_names_are_refused(server, name):
    response = server.complete(prompt=TEXT, model=name)
    assert_refused(response, 404, *map(repr, NAMES), param='model', code='model_not_found')
    assert_free(server.worker)


def test_a_failed_step_of_one_plan_leaves_the_others(server, monkeypatch):
    failing = server.engines[1]
    monkeypatch.setattr(failing, 'step', lambda: 1 / 0)
    bad = in_background(lambda: server.complete(prompt=TEXT, model=NAMES[1]))
    for _ in range(3):
        assert server.complete(prompt=TEXT, model=NAMES[2], seed=3).json()['choices'][0][
            'text'] == text_of(2, seed=3)
    assert_refused(bad.result(), 500, 'the model fails')


def test_a_plans_rows_are_free_while_those_of_another_are_taken(serve, held):
    server = serve(model=BASE, plans=SERVED, rows=1, max_waiting=0)
    calls = []
    for n, name in enumerate(NAMES, 1):
        calls.append(in_background(lambda name=name: server.complete(prompt=TEXT, model=name)))
        server.wait_for(n)
    assert_refused(server.complete(prompt=TEXT), 429, 'too many requests')
    held.set()
    assert [call.result().status_code for call in calls] == [200] * 3


def test_all_models_are_listed(server):
    listed = server.client.get('/v1/models').json()['data']
    assert [model['id'] for model in listed] == NAMES


def test_the_page_shows_the_chosen_plan(markup_server, visit):
    from playwright.sync_api import expect
    server = markup_server(model=BASE, plans=SERVED)
    page = visit(server)
    options = page.locator('#plans')
    expect(options).to_be_visible()
    assert options.locator('option').all_inner_texts() == NAMES
    for i in (0, 2, 1):
        options.select_option(NAMES[i])
        expect(page.locator('#lanes canvas')).to_have_count(len(MODELS[i].plan.slots))
        send(page, 'ab1', tokens=20)
        lanes = drawn(page)
        assert [len(lane['cells']) for lane in lanes if lane['cells']][0] == \
            MODELS[i].plan.slots[0].capacity(LONGEST)
        assert options.input_value() == NAMES[i]
        said = server.chat(dict(role='user', content='ab1'), model=NAMES[i], temperature=0,
                           max_tokens=20).json()['choices'][0]['message']['content']
        assert page.locator('#turns .assistant span').first.text_content().strip() == said.strip()
        page.get_by_role('button', name='New chat').click()
