"""Faults of the engine or of a route: which requests fail, and that the server continues."""
import logging

import pytest

from tests.serving.conftest import (
    COMPLETIONS, MODEL, assert_free, assert_refused, expected, in_background)


@pytest.fixture
def failing():
    """`failing(when)` makes each forward pass of the model fail for which `when(ids)` is true."""
    hooks = []

    def arm(when):
        def fail(module, args):
            if when(args[0]):
                raise RuntimeError('the device is on fire')
        hooks.append(MODEL.register_forward_pre_hook(fail))
    logging.getLogger('nanokv.serving').disabled = True
    yield arm
    logging.getLogger('nanokv.serving').disabled = False
    for hook in hooks:
        hook.remove()


def test_a_step_that_fails_once_changes_no_text(serve, failing):
    passes, server, text = [], serve(), expected('abc', seed=1).text
    failing(lambda ids: passes.append(1) or len(passes) in (1, 5, 6))
    assert server.text(seed=1) == text
    passes.clear()
    assert server.complete(seed=1, stream=True).status_code == 200
    assert server.metric('failed_steps_total') == 6
    assert_free(server.worker)


@pytest.mark.parametrize('stream', [False, True])
def test_a_request_that_always_fails_ends_and_the_next_ones_are_answered(serve, failing, stream):
    server = serve()
    failing(lambda ids: (ids == 22).any())  # a "w", which only the failing request contains
    assert_refused(server.complete(prompt='abw', stream=stream), 500, 'the model fails')
    assert server.metric('failed_steps_total') == 3
    assert server.text(temperature=0) == expected('abc', temperature=0).text
    assert_free(server.worker)
    assert server.client.get('/health').status_code == 200


def test_a_bug_in_a_route_is_an_internal_error(serve, monkeypatch):
    server = serve()
    monkeypatch.setattr(server.worker, 'submit', lambda *args: 1 / 0)
    assert_refused(server.complete(), 500, 'internal error')
    assert server.metric('requests_total', route=COMPLETIONS, status='500') == 1


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
def test_when_the_worker_dies_all_requests_fail(serve, held, failing):
    server = serve()

    def publish(*args):
        raise SystemExit  # would end a thread silently
    server.metrics.publish = publish
    answers = [in_background(server.complete) for _ in range(3)]
    server.wait_for(3)
    held.set()
    for answer in answers:
        assert_refused(answer.result(), 503)
    assert server.client.get('/health').status_code == 503
