"""Faults of the engine or of a route: who is told what, and that the server lives on."""
import logging

import pytest

from engine.engine import Engine
from engine.params import SamplingParams
from tests.helpers.serving import TOKENIZER, alone, model_of
from tests.serving.conftest import assert_free, eventually
from tests.serving.test_limits import COMPLETIONS, assert_refused, in_background


@pytest.fixture
def failing(monkeypatch):
    """`failing(when)`: each forward pass of the model for which `when(ids)` fails."""
    model, hooks = model_of('full stack'), []

    def arm(when):
        def fail(module, args, kwargs=None):
            if when(args[0]):
                raise RuntimeError('the device is on fire')
        hooks.append(model.register_forward_pre_hook(fail))
    logging.getLogger('nanokv.serving').disabled = True
    yield arm
    logging.getLogger('nanokv.serving').disabled = False
    for hook in hooks:
        hook.remove()


def test_a_step_that_fails_once_is_not_noticed(serve, failing):
    passes, server = [], serve()
    said = alone(model_of('full stack'), 'abc', SamplingParams(12, seed=1), tokenizer=TOKENIZER)
    failing(lambda ids: passes.append(1) or len(passes) in (1, 5, 6))
    for stream in (False, True):
        response = server.client.post(COMPLETIONS, json=dict(prompt='abc', seed=1, stream=stream))
        assert response.status_code == 200
        passes.clear()
        if not stream:
            assert response.json()['choices'][0]['text'] == said.text
    assert server.metrics.registry.get_sample_value('nanokv_failed_steps_total') == 6
    assert_free(server.worker)


@pytest.mark.parametrize('stream', [False, True])
def test_a_request_that_always_fails_ends_alone(serve, held, failing, stream):
    """Here it came last."""
    server, good = serve(rows=3), []
    failing(lambda ids: (ids == 22).any())  # nobody else has a w, and it is never drawn below
    others = [dict(prompt='abc' * k, temperature=0, max_tokens=12) for k in (1, 2)]
    for other in others:
        good.append(in_background(lambda other=other: server.client.post(COMPLETIONS, json=other)))
    eventually(lambda: server.worker._num_open == 2)
    bad = in_background(lambda: server.client.post(COMPLETIONS, json=dict(prompt='abw', stream=stream)))
    eventually(lambda: server.worker._num_open == 3)
    held.set()
    bad.join()
    assert_refused(bad.result, 500, 'failed on this request')
    for thread, other in zip(good, others):
        thread.join()
        said = alone_without_hooks(other)
        assert 'w' not in said and thread.result.json()['choices'][0]['text'] == said
    assert_free(server.worker)
    assert server.client.get('/health').status_code == 200


def alone_without_hooks(fields):
    return alone(model_of('full stack'), fields['prompt'], SamplingParams(fields['max_tokens'], temperature=0),
                 tokenizer=TOKENIZER).text


def test_steps_that_all_fail_end_all_and_the_server_lives(serve, monkeypatch, failing):
    server, plain = serve(rows=2), Engine.step

    def step(engine):
        raise MemoryError
    monkeypatch.setattr(Engine, 'step', step)
    threads = [in_background(lambda: server.client.post(COMPLETIONS, json=dict(prompt='abc', n=2))) for _ in range(3)]
    for thread in threads:
        thread.join()
        assert_refused(thread.result, 500)
    monkeypatch.setattr(Engine, 'step', plain)
    assert server.client.post(COMPLETIONS, json=dict(prompt='abc')).status_code == 200
    assert_free(server.worker)


def test_logits_that_are_not_finite_are_our_fault(serve):
    server, model = serve(), model_of('full stack')
    hook = model.register_forward_hook(lambda module, args, out: (out[0] * float('nan'), out[1]))
    try:
        assert_refused(server.client.post(COMPLETIONS, json=dict(prompt='abc')), 500, 'not finite')
    finally:
        hook.remove()
    assert server.client.post(COMPLETIONS, json=dict(prompt='abc')).status_code == 200


def test_a_bug_in_a_route_is_told_as_one(serve, monkeypatch):
    server = serve()
    monkeypatch.setattr(server.worker, 'submit', lambda *args: 1 / 0)
    assert_refused(server.client.post(COMPLETIONS, json=dict(prompt='abc')), 500, 'internal error')
    labels = dict(route=COMPLETIONS, status='500')
    assert server.metrics.registry.get_sample_value('nanokv_requests_total', labels) == 1


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
def test_a_worker_that_dies_leaves_nobody_waiting(serve, held, failing):
    server = serve()

    def publish(*args):
        raise SystemExit  # which ends a thread without a word
    server.metrics.publish = publish
    threads = [in_background(lambda: server.client.post(COMPLETIONS, json=dict(prompt='abc'))) for _ in range(3)]
    eventually(lambda: server.worker._num_open == 3)
    held.set()
    for thread in threads:
        thread.join()
        assert_refused(thread.result, 503)
    assert server.client.get('/health').status_code == 503
