"""Replays: what is sent when, what of it had to be computed, and what failures do."""
import threading

import pytest

from config.errors import UserError
from lab.sessions import __main__ as program
from lab.sessions.client import Answer, Failed
from lab.sessions.presets import make
from lab.sessions.replay import Replay, TextPrompts, TokenPrompts
from lab.sessions.trace import Request
from tests.helpers.sessions import FORKS, Fake, ids_of, line, new_tokens, one_by_one, trace_of

# -- prompts ---------------------------------------------------------------------------------------

def test_prompts_continue_with_the_replies_of_the_server():
    trace = make('forking', 3, sessions=5, **FORKS)
    kinds = [request.kind for session in trace.sessions for request in session.requests]
    assert {'turn', 'edit', 'regenerate', 'fork'} <= set(kinds)
    assert any(request.keep for session in trace.sessions for request in session.requests)
    client, wanted = Fake(), one_by_one(trace)
    replay = Replay(trace, client, ids_of(trace, return_token_ids=True), users=1)
    found = replay.run()
    assert [path for path, _ in client.asked] == ['completions'] * trace.n_requests
    for (_, document), (session, i, prompt, _) in zip(client.asked, wanted, strict=True):
        assert document == {'prompt': prompt, 'model': 'fake', 'temperature': 0,
                            'max_tokens': session.requests[i].reply, 'return_token_ids': True}
    asked = [(session.number, i, session.requests[i].kind, '') for session, i, *_ in wanted]
    assert asked == [(r['session'], r['request'], r['kind'], r['error']) for r in replay.records]
    assert [len(prompt) for *_, prompt, _ in wanted] == [r['prompt'] for r in replay.records]
    assert (found['ended'], found['failed']) == (trace.n_requests, 0)
    assert found['reply_tokens'] == sum(len(reply) for *_, reply in wanted)


def test_ids_of_a_trace_are_in_their_range():
    trace = trace_of(line(2, message=200), systems=[300])
    documents = [TokenPrompts(trace, ids, {}).document(trace.sessions[0], 0, {})[0]['prompt']
                 for ids in ((0, 7), (7, 9), (3, 4))]
    assert [sorted(set(prompt)) for prompt in documents] == [list(range(7)), [7, 8], [3]]
    assert all(len(prompt) == 500 for prompt in documents)


@pytest.mark.parametrize('seed', [1, 2])
def test_what_is_unavoidable(seed):
    """A server that keeps everything computes just that; one that keeps nothing, every token."""
    trace = make('forking', seed, sessions=5, **FORKS)
    pairs = [(prompt, reply) for *_, prompt, reply in one_by_one(trace)]
    new, n_prompt = new_tokens(pairs), sum(len(prompt) for prompt, _ in pairs)
    lasts = iter([len(prompt) - n for (prompt, _), n in zip(pairs, new)])
    replay = Replay(trace, Fake(lambda document: next(lasts)), ids_of(trace), users=1)
    found = replay.run()
    assert [record['unavoidable'] for record in replay.records] == new
    assert (found['unavoidable'], found['prompt_tokens']) == (sum(new), n_prompt)
    assert (found['computed'], found['over_unavoidable']) == (sum(new), 1.0)
    found = Replay(trace, Fake(lambda document: 0), ids_of(trace), users=1).run()
    assert found['computed'] == n_prompt and found['unavoidable'] == sum(new)
    assert found['over_unavoidable'] == pytest.approx(n_prompt / sum(new))


def test_a_prompt_is_known_while_its_reply_is_not_yet_there():
    trace = trace_of(line(1), line(1), systems=[20])
    together = threading.Barrier(2)
    replay = Replay(trace, Fake(gate=lambda number: together.wait(20)), ids_of(trace), users=2)
    replay.run()
    assert sorted(record['unavoidable'] for record in replay.records) == [3, 23]


def test_conversations_as_text():
    trace = make('forking', 3, sessions=4, **FORKS)
    trace.sessions[0].system = -1
    client = Fake()
    found = Replay(trace, client, TextPrompts(trace, {'top_k': 3}), users=1).run()
    assert found['failed'] == 0 and found['ended'] == trace.n_requests
    asked, said, systems = iter(client.asked), {}, {}
    for session in sorted(trace.sessions, key=lambda session: session.requests[0].at):
        for i, request in enumerate(session.requests):
            path, document = next(asked)
            messages = document.pop('messages')
            assert path == 'chat/completions' and document == {
                'model': 'fake', 'temperature': 0, 'max_tokens': request.reply, 'top_k': 3}
            if session.system >= 0:
                system = messages.pop(0)
                assert system['role'] == 'system'
                assert system == systems.setdefault(session.system, system)
                assert len(system['content'].split()) == trace.systems[session.system]
            assert [m['role'] for m in messages] == (['user', 'assistant'] * len(messages))[
                :len(messages)] and messages[-1]['role'] == 'user'
            assert messages[:-1] == said.get((session.number, request.after), [])
            words = messages[-1]['content'].split()
            assert len(words) == request.message
            if request.keep:
                like = said[session.number, request.like][-2]['content'].split()
                assert words[:request.keep] == like[:request.keep]
            answer = Answer(0.0)
            client.say(answer, {'messages': ([system] if session.system >= 0 else []) + messages,
                                'max_tokens': request.reply})
            said[session.number, i] = messages + [{'role': 'assistant', 'content': answer.text}]


def test_what_is_unavoidable_is_estimated_from_text():
    trace = trace_of(line(2, message=30, reply=20), line(1, message=30), systems=[40])
    replay = Replay(trace, Fake(), TextPrompts(trace, {}), users=1)
    replay.run()
    first, second, other = replay.records
    assert first['unavoidable'] == first['prompt']
    for record, share in ((second, 30 / 120), (other, 30 / 70)):  # words are about as long
        assert abs(record['unavoidable'] / record['prompt'] - share) < 0.12


def test_a_token_at_least_is_unavoidable_in_a_text():
    again = Request(1.0, -1, 30, 2, 'regenerate', like=0, keep=30)
    trace = trace_of([*line(1, message=30), again])
    replay = Replay(trace, Fake(), TextPrompts(trace, {}), users=1)
    replay.run()
    assert all(1 <= record['unavoidable'] <= record['prompt'] for record in replay.records)


# -- failures --------------------------------------------------------------------------------------

def test_what_follows_a_failed_request_is_not_sent():
    requests = [Request(i, after, 3, 2) for i, after in enumerate((-1, 0, -1, 1, 2))]
    trace = trace_of(requests)

    def gate(number):
        if number == 0:
            raise Failed('then boom')  # sorts behind the consequence
    client = Fake(gate=gate)
    replay = Replay(trace, client, ids_of(trace), users=1)
    found = replay.run()
    errors = [record['error'] for record in replay.records]
    assert errors[0] == 'then boom' and errors[2] == errors[4] == ''
    assert errors[1] == errors[3] and 'failed' in errors[1]
    assert len(client.asked) == 3 and [r['request'] for r in replay.records] == [0, 1, 2, 3, 4]
    assert (found['ended'], found['failed'], found['requests']) == (2, 3, 5)
    assert found['errors'] == errors[:2]  # the cause first


def test_a_server_that_does_not_say_ids():
    class Silent(Fake):
        def say(self, answer, document):
            super().say(answer, document)
            answer.tokens, answer.text = [], 'abc'
    trace, client = trace_of(line(2), line(2)), Silent()
    replay = Replay(trace, client, ids_of(trace), users=1)
    with pytest.raises(UserError, match='--prompts=text'):
        replay.run()
    assert len(client.asked) == 1 and not replay.records


def test_an_empty_reply_fails_alone():
    class Brief(Fake):
        def say(self, answer, document):
            super().say(answer, document)
            if len(self.asked) == 3:  # the first request of the second session
                answer.tokens, answer.text, answer.stamps = [], '', []
    trace = trace_of(line(2), line(2), line(2))
    found = Replay(trace, Brief(), ids_of(trace), users=1).run()
    assert (found['ended'], found['failed']) == (4, 2)
    assert found['errors'][0] == 'the reply is empty'


def test_a_server_without_usage():
    class Silent(Fake):
        def say(self, answer, document):
            super().say(answer, document)
            answer.usage = {}
    trace = trace_of(line(2))
    found = Replay(trace, Silent(), ids_of(trace), users=1).run()
    assert found['prompt_tokens'] is found['unavoidable'] is found['computed'] is None
    assert found['ended'] == 2
    program.replay_table(found)


def test_replies_that_end_early_are_told():
    class Short(Fake):
        def say(self, answer, document):
            super().say(answer, document)
            answer.tokens, answer.stamps = answer.tokens[:1], answer.stamps[:1]
    trace = trace_of(line(2, reply=5))
    early = Replay(trace, Short(), ids_of(trace), users=1).run()
    whole = Replay(trace, Fake(), ids_of(trace), users=1).run()
    assert (early['reply_tokens'], early['asked_tokens']) == (2, 10)
    assert '2 of the 10 tokens' in program.replay_table(early).title
    assert whole['asked_tokens'] == 10 and 'asked for' not in program.replay_table(whole).title


def test_an_empty_reply_is_a_failure():
    class Silent(Fake):
        def say(self, answer, document):
            pass
    trace = trace_of(line(1))
    found = Replay(trace, Silent(), TextPrompts(trace, {}), users=1).run()
    assert found['ended'] == 0 and found['failed'] == 1
    assert found['computed'] is None and found['ttft_s'] == {}


def test_a_server_that_does_not_say_what_it_had():
    trace = trace_of(line(3))
    found = Replay(trace, Fake(), ids_of(trace), users=1).run()
    assert found['computed'] is None and found['over_unavoidable'] is None
    assert found['prompt_tokens'] == 3 + 8 + 13 and found['failed'] == 0
    assert 'not known' in program.replay_table(found).title


# -- when requests are sent ------------------------------------------------------------------------

@pytest.mark.parametrize('rate', [1.0, 20.0])
def test_open_loop(rate):
    """Not before its time, not before the reply before, and not much later than that."""
    trace = trace_of([Request(rate * at, after, 3, 2) for at, after in (
        (0.0, -1), (0.1, 0), (0.6, 0))], line(2, at=0.25 * rate))
    client = Fake(seconds=0.2)
    replay = Replay(trace, client, ids_of(trace), rate=rate)
    found = replay.run()
    sent = {(r['session'], r['request']): r['sent'] for r in replay.records}
    ended = {(r['session'], r['request']): r['ended'] for r in replay.records}
    for session in trace.sessions:
        for i, request in enumerate(session.requests):
            due = max(request.at / rate, ended.get((session.number, i - 1), 0.0))
            assert due - 0.001 <= sent[session.number, i] < due + 1.5
    assert found['seconds'] == pytest.approx(max(ended.values()) - min(sent.values()))
    assert client.most == 2 and found['rate'] == rate and found['users'] == 0


def test_an_open_loop_begins_with_the_first_request():
    trace = trace_of(line(6, at=30.2, every=0.2), line(1, at=30.0))
    replay = Replay(trace, Fake(), ids_of(trace))
    replay.run()
    sent = [record['sent'] for record in replay.records]
    assert all(0.2 * i - 0.001 <= at < 0.2 * i + 1.5 for i, at in enumerate(sent))


def test_closed_loop():
    """As many users as asked for, never more, and no pauses."""
    trace = trace_of(*(line(2, at=500 * k, every=100) for k in range(7)))
    together = threading.Barrier(3)

    def gate(number):
        if number < 3:
            together.wait(20)
    client = Fake(gate=gate, seconds=0.01)
    replay = Replay(trace, client, ids_of(trace), users=3)
    found = replay.run()
    assert client.most == 3 and found['ended'] == 14 and found['seconds'] < 10
    for session in trace.sessions:
        first, second = [r for r in replay.records if r['session'] == session.number]
        assert first['request'] == 0 and first['ended'] <= second['sent']
    assert Replay(trace_of(line(1)), Fake(), ids_of(trace), users=50).run()['ended'] == 1


def test_records_are_shown_as_they_come():
    trace, counts = trace_of(line(4)), []
    Replay(trace, Fake(seconds=0.15), ids_of(trace), users=1).run(
        lambda records: counts.append(len(records)))
    assert counts == sorted(counts) and counts[-1] == 4 and len(set(counts)) > 2
