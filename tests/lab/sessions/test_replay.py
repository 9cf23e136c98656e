"""Traces: what files say, and what no cache can save. Replays: what is sent when, what of it had to
be computed, and what failures do."""
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.sessions import __main__ as program
from lab.sessions import trace as traces
from lab.sessions.client import Failed
from lab.sessions.replay import Known
from lab.sessions.trace import Request, Trace
from tests.helpers.sessions import (
    Fake, common, forking, line, new_tokens, one_by_one, replay_of, trace_of, written)
from tests.serving.conftest import Running

SHIPPED = Path(traces.__file__).parent / 'traces'


@pytest.mark.parametrize('name', ['chat', 'editing', 'forking'])
def test_the_shipped_traces(name):
    """Conversations have at most 4,096 tokens, and requests follow those before them."""
    trace = Trace.read(SHIPPED / f'{name}.jsonl')
    assert trace.name == name
    for session in trace.sessions:
        lengths = {-1: trace.system_length}
        for i, request in enumerate(session):
            lengths[i] = lengths[request.after] + request.message + request.reply
            assert request.like < i and request.keep <= request.message
        assert max(lengths.values()) <= 4096


def test_a_message_keeps_what_the_one_before_it_had():
    trace = trace_of(forking(), forking(), system=5)
    first, second, edited, again, *_ = (trace.message(0, i) for i in range(6))
    assert np.array_equal(first, again) and len(edited) == 8
    assert np.array_equal(edited[:3], second[:3]) and edited[3] != second[3]
    assert len(trace.system()) == 5 and not np.array_equal(first, trace.message(1, 0))


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=12))
def test_what_no_cache_can_save(sequences):
    known = Known()
    for i, tokens in enumerate(sequences):
        longest = max((common(tokens, other) for other in sequences[:i]), default=0)
        assert known.unavoidable(tokens) == len(tokens) - min(longest, len(tokens) - 1) >= 1
        known.add(tokens)


# -- replays

def test_prompts_continue_with_the_replies_of_the_server_and_what_of_them_is_unavoidable():
    trace = trace_of(forking(at=9), forking(), line(2, message=8), system=6)
    pairs, client = one_by_one(trace), Fake()
    replay = replay_of(trace, client, 1, return_token_ids=True)
    found = replay.run()
    for document, (prompt, reply) in zip(client.asked, pairs, strict=True):
        assert document == {'prompt': prompt, 'temperature': 0, 'max_tokens': len(reply),
                            'return_token_ids': True}
    assert [len(prompt) for prompt, _ in pairs] == [answer.prompt for answer in replay.answers]
    assert (found['ended'], found['failed'], found['computed']) == (14, 0, None)
    assert found['reply_tokens'] == sum(len(reply) for _, reply in pairs)
    # a server that keeps everything computes what is unavoidable; one that keeps nothing, all
    new, n_prompt = new_tokens(pairs), sum(len(prompt) for prompt, _ in pairs)
    lasts = iter([len(prompt) - n for (prompt, _), n in zip(pairs, new)])
    replay = replay_of(trace, Fake(lambda document: next(lasts)), 1)
    found = replay.run()
    assert [answer.unavoidable for answer in replay.answers] == new
    assert (found['unavoidable'], found['prompt_tokens']) == (sum(new), n_prompt)
    assert (found['computed'], found['over_unavoidable']) == (sum(new), 1.0)
    found = replay_of(trace, Fake(lambda document: 0), 1).run()
    assert found['computed'] == n_prompt and found['unavoidable'] == sum(new)
    assert found['over_unavoidable'] == pytest.approx(n_prompt / sum(new))


def test_open_loop():
    """Not before its time, not before the reply before, and not much later than that."""
    trace = trace_of([Request(30 + 20 * at, after, 3, 5 + after) for at, after in (
        (0.0, -1), (0.1, 0), (0.6, 1))], [Request(35, -1, 3, 9), Request(35, 0, 3, 10)])
    client = Fake(seconds=0.2)
    replay, start = replay_of(trace, client, rate=20.0), time.perf_counter()
    found = replay.run()
    answers = {answer.asked: answer for answer in replay.answers}
    for session in trace.sessions:
        before = 0.0
        for request in session:
            due = max(start + (request.at - 30) / 20, before)
            assert due - 0.001 <= answers[request.reply].started < due + 1.5
            before = answers[request.reply].ended
    assert len(answers) == 5 and 0.6 < found['seconds'] < 10
    assert client.most == 2 and found['rate'] == 20 and found['users'] == 0


def test_a_summary():
    """Of three replies, one of them shorter than asked for, and a failure."""
    parts = [([0.5, 0.7, 1.1], 2, 2), ([0.1], 3, 0), ([0.2, 0.4], 0, 0)]

    class Scripted(Fake):
        def say(self, answer, document):
            stamps, answer.refused, cached = parts[len(self.asked) - 1]
            answer.tokens = list(range(len(stamps)))
            answer.stamps = [answer.started + stamp for stamp in stamps]
            answer.usage = {'prompt_tokens_details': {'cached_tokens': cached}}

    def gate(number):
        if number == 3:
            raise Failed('boom')
    trace = trace_of(*(line(1, at=k, message=4, reply=3) for k in range(4)))
    found = replay_of(trace, Scripted(gate=gate, seconds=0.02), 1).run()
    assert (found['prompt_tokens'], found['computed'], found['reply_tokens']) == (12, 10, 6)
    assert found['over_unavoidable'] == 10 / found['unavoidable']
    assert (found['ended'], found['failed'], found['errors']) == (3, 1, ['boom'])
    assert found['refused'] == 5 and found['ttft_s']['p50'] == pytest.approx(0.2)
    assert found['tpot_s'] == pytest.approx({'p50': 0.25, 'p95': 0.295, 'p99': 0.299, 'p100': 0.3})
    assert found['gap_s']['p50'] == pytest.approx(0.2)
    assert found['tokens_per_second'] == pytest.approx(6 / found['seconds'])
    assert '6 of the 9 tokens' in program.table(found).title
    found = replay_of(trace, Fake(), 1).run()  # it does not say what it computed
    assert found['computed'] is None and 'not known' in program.table(found).title


def test_our_server_computes_what_it_must(tmp_path, capsys):
    """Its window is as large as a block of the prefix cache, so that it can go on from any token;
    and no part of its store is evicted. A replay with failures ends with status 1."""
    trace = trace_of(forking(), forking(at=1), system=11)
    short = str(written(trace, tmp_path / 't'))
    long = str(written(trace_of(line(2, message=70)), tmp_path / 'long'))  # more than it takes
    server = Running()
    try:
        common = [f'--url=127.0.0.1:{server.port}', '--users=1', '--ids', '0', '23']
        program.main([short, *common])
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        with pytest.raises(SystemExit) as raised:
            program.main([long, *common])
    finally:
        server.stop()
    assert (found['failed'], found['ended']) == (0, 12)
    assert found['reply_tokens'] == found['asked_tokens'] == 48
    assert found['over_unavoidable'] == 1.0 and 0 < found['computed'] < found['prompt_tokens']

    assert raised.value.code == 1
    failed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert failed['failed'] == 2 and any('70 tokens' in error for error in failed['errors'])
