"""Replays: what is sent when, what of it had to be computed, and what failures do."""
import json
import threading
import time

import pytest

from config.errors import UserError
from lab.sessions import __main__ as program
from lab.sessions.client import Answer, Failed
from lab.sessions.presets import make
from lab.sessions.replay import Replay, TextPrompts, measured, percentiles
from lab.sessions.trace import Request
from tests.helpers.sessions import FORKS, Fake, ids_of, line, new_tokens, one_by_one, trace_of
from tests.serving.conftest import Running

# -- prompts ---------------------------------------------------------------------------------------

def test_prompts_continue_with_the_replies_of_the_server_and_what_of_them_is_unavoidable():
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
    # a server that keeps everything computes what is unavoidable; one that keeps nothing, all
    pairs = [pair[2:] for pair in wanted]
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


# -- failures --------------------------------------------------------------------------------------

def test_what_follows_a_failed_request_is_not_sent():
    requests = [Request(i, after, 3, 2) for i, after in enumerate((-1, 0, -1, 1, 2))]
    trace = trace_of(requests)

    def gate(number):
        if number == 0:
            raise Failed('then boom')
    client = Fake(gate=gate)
    replay = Replay(trace, client, ids_of(trace), users=1)
    found = replay.run()
    errors = [record['error'] for record in replay.records]
    assert errors[0] == 'then boom' and errors[2] == errors[4] == ''
    assert errors[1] == errors[3] and 'failed' in errors[1]
    assert len(client.asked) == 3 and [r['request'] for r in replay.records] == [0, 1, 2, 3, 4]
    assert (found['ended'], found['failed'], found['requests']) == (2, 3, 5)
    assert found['errors'] == errors[:2]  # the cause first


def test_replies_without_ids_end_a_replay_and_empty_ones_fail_alone():
    class Spoiled(Fake):
        def say(self, answer, document):
            if len(self.asked) != 3:  # the first request of the second session
                super().say(answer, document)
            elif text:
                answer.text, answer.stamps = text, [answer.started]
    trace = trace_of(line(2), line(2), line(2))
    text = ''
    found = Replay(trace, Spoiled(), ids_of(trace), users=1).run()
    assert (found['ended'], found['failed']) == (4, 2)
    assert found['errors'][0] == 'the reply is empty'
    text = 'abc'
    with pytest.raises(UserError, match='--prompts=text'):
        Replay(trace, Spoiled(), ids_of(trace), users=1).run()
# -- conversations as text -------------------------------------------------------------------------

def test_conversations_as_text():
    requests = [*line(2, message=6), Request(9, -1, 6, 2, kind='edit', like=0, keep=4)]
    trace = trace_of(requests, systems=[5])
    trace.sessions += trace_of(requests).sessions
    client = Fake()
    found = Replay(trace, client, TextPrompts(trace, {'top_k': 3}), users=1).run()
    assert found['failed'] == 0 and found['ended'] == 6
    messages = [document.pop('messages') for _, document in client.asked]
    assert client.asked == [('chat/completions', {
        'model': 'fake', 'temperature': 0, 'max_tokens': 2, 'top_k': 3})] * 6
    system = messages[0][:1]
    assert system[0]['role'] == 'system'
    for before, (first, second, edited) in ((system, messages[:3]), ([], messages[3:])):
        answer = Answer(0.0)
        client.say(answer, {'messages': first, 'max_tokens': 2})
        assert second[:-1] == [*first, {'role': 'assistant', 'content': answer.text}]
        assert first[:-1] == edited[:-1] == before
        assert {each[-1]['role'] for each in (first, second, edited)} == {'user'}
        words = [each[-1]['content'].split() for each in (first, second, edited)]
        assert [*map(len, words)] == [6] * 3
        assert words[2][:4] == words[0][:4] and words[2][4:] != words[0][4:]


def test_what_is_unavoidable_is_estimated_from_text():
    trace = trace_of(line(2, message=30, reply=20), line(1, message=30), systems=[40])
    replay = Replay(trace, Fake(), TextPrompts(trace, {}), users=1)
    replay.run()
    first, *others = replay.records
    assert first['unavoidable'] == first['prompt']
    for record, share in zip(others, (30 / 120, 30 / 70)):  # words are about as long
        assert abs(record['unavoidable'] / record['prompt'] - share) < 0.12
# -- when requests are sent ------------------------------------------------------------------------

def test_open_loop():
    """Not before its time, not before the reply before, and not much later than that."""
    trace = trace_of([Request(30 + 20 * at, after, 3, 2) for at, after in (
        (0.0, -1), (0.1, 0), (0.6, 0))], line(2, at=35.0))
    client = Fake(seconds=0.2)
    replay = Replay(trace, client, ids_of(trace), rate=20.0)
    found = replay.run()
    records = {(r['session'], r['request']): r for r in replay.records}
    for (session, i), record in records.items():
        before = records[session, i - 1]['ended'] if i else 0.0
        due = max((trace.sessions[session].requests[i].at - 30) / 20, before)
        assert due - 0.001 <= record['sent'] < due + 1.5
    sent, ended = ([r[name] for r in replay.records] for name in ('sent', 'ended'))
    assert found['seconds'] == pytest.approx(max(ended) - min(sent)) and len(sent) == 5
    assert client.most == 2 and found['rate'] == 20 and found['users'] == 0


def test_closed_loop():
    """As many users as asked for, never more, and no pauses."""
    trace = trace_of(*(line(2, at=500 * k, every=100) for k in range(7)))
    together = threading.Barrier(3)
    client = Fake(gate=lambda number: number < 3 and together.wait(20), seconds=0.01)
    replay = Replay(trace, client, ids_of(trace), users=3)
    found = replay.run()
    assert client.most == 3 and found['ended'] == 14 and found['seconds'] < 10
    for session in trace.sessions:
        first, second = [r for r in replay.records if r['session'] == session.number]
        assert first['request'] == 0 and first['ended'] <= second['sent']
# -- numbers ---------------------------------------------------------------------------------------

def test_what_is_measured_of_a_reply():
    answer = Answer(10.0, [1, 2, 3, 4, 5], 'abc', [10.5, 10.7, 11.1],
                    {'prompt_tokens': 40, 'completion_tokens': 6,
                     'prompt_tokens_details': {'cached_tokens': 30}}, refused=2)
    found = measured(answer, 0.25)
    assert found == {'prompt': 40, 'reply': 5, 'cached': 30, 'unavoidable': 10,
                     'ttft': pytest.approx(0.5), 'tpot': pytest.approx(0.15),
                     'gaps': pytest.approx([0.2, 0.4])}
    answer.tokens, answer.usage['prompt_tokens_details'] = [], None
    found = measured(answer, 1.0)
    assert (found['reply'], found['cached'], found['unavoidable']) == (6, None, 40)
    answer.usage = {}
    found = measured(answer, 1.0)
    assert (found['reply'], found['prompt'], found['cached']) == (3, 0, None)
    assert found['tpot'] == pytest.approx(0.3) and percentiles([]) == {}


def test_a_summary():
    """Of three replies, one of them shorter than asked for, and a failure. Only some say what was
    cached."""
    parts = [([0.5, 0.7, 1.1], 2, {'cached_tokens': 2}), ([0.1], 3, {'cached_tokens': 0}),
             ([0.2, 0.4], 0, None)]

    class Made(Fake):
        def say(self, answer, document):
            stamps, answer.refused, details = parts[len(self.asked) - 1]
            answer.tokens = list(range(len(stamps)))
            answer.stamps = [answer.started + stamp for stamp in stamps]
            answer.usage = {'prompt_tokens': len(document['prompt']),
                            'prompt_tokens_details': details}

    def gate(number):
        if number == 3:
            raise Failed('boom')
    trace = trace_of(*(line(1, at=k, message=4, reply=3) for k in range(4)))
    replay = Replay(trace, Made(gate=gate, seconds=0.02), ids_of(trace), users=1)
    found = replay.run()
    assert found['unavoidable'] == sum(record['unavoidable'] for record in replay.records[:3])
    assert (found['prompt_tokens'], found['computed'], found['reply_tokens']) == (12, 10, 6)
    assert found['over_unavoidable'] == 10 / found['unavoidable']
    assert (found['ended'], found['failed'], found['errors']) == (3, 1, ['boom'])
    assert found['refused'] == 5 and 0.06 <= found['seconds'] < 10
    assert found['ttft_s']['p50'] == pytest.approx(0.2) and found['ttft_s']['max'] == 0.5
    assert found['tpot_s'] == pytest.approx({'p50': 0.25, 'p95': 0.295, 'p99': 0.299, 'max': 0.3})
    assert found['gap_s']['p50'] == pytest.approx(0.2)
    assert found['tokens_per_second'] == pytest.approx(6 / found['seconds'])
    assert '6 of the 9 tokens' in program.replay_table(found).title
    parts = [(stamps, 0, None) for stamps, *_ in parts]  # it does not say what it computed
    found = Replay(trace, Made(gate=gate), ids_of(trace), users=1).run()
    assert found['computed'] is found['over_unavoidable'] is None
    assert 'not known' in program.replay_table(found).title
# -- the program, and our own server ---------------------------------------------------------------

def test_our_server_computes_what_it_must(tmp_path, capsys):
    """Its window is as large as a block of the prefix cache, so that it can go on from any token;
    and no part of its store is evicted. A replay with failures ends with status 1."""
    trace = make('forking', 3, sessions=2, turns=6.0, message=5, reply=4, systems=(11,), longest=56)
    trace.write(tmp_path / 't')
    trace_of(line(2, message=70)).write(tmp_path / 'long')  # longer than the server takes
    server = Running()
    try:
        common = [f'--url=127.0.0.1:{server.port}', '--ids=0:23', '--users=1']
        program.main(['replay', f'{tmp_path / "t"}', *common, f'--save={tmp_path / "f.json"}',
                      f'--records={tmp_path / "r"}'])
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        with pytest.raises(SystemExit) as raised:
            program.main(['replay', f'{tmp_path / "long"}', *common])
    finally:
        server.stop()
    records = [*map(json.loads, (tmp_path / 'r').read_text().splitlines())]
    lengths = {(s.number, i): r.reply for s in trace.sessions for i, r in enumerate(s.requests)}
    assert {(r['session'], r['request']): r['reply'] for r in records} == lengths
    assert (found['failed'], found['ended'], found['model']) == (0, trace.n_requests, 'tiny')
    assert found['over_unavoidable'] == 1.0 and 0 < found['computed'] < found['prompt_tokens']
    assert found == json.loads((tmp_path / 'f.json').read_text())

    assert raised.value.code == 1
    failed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert failed['failed'] == 2 and any('70 tokens' in error for error in failed['errors'])


@pytest.mark.parametrize('args, why', [
    (['replay', 't', '--url=x', '--users=-1'], 'users=-1'),
    (['replay', 't', '--url=x', '--rate=0'], 'rate=0'),
    (['make', 'chat', '--save=nowhere/t'], 'save='),
    (['replay', 't', '--start=vllm', '--program=nowhere'], 'nowhere is not there'),
    (['replay', 't', '--url=127.0.0.1:1'], 'refused'),
    (['stall', '--url=127.0.0.1:1'], 'refused'), (['soak', '--url=127.0.0.1:1'], 'refused')],
    ids=str)
def test_what_cannot_be_is_refused(args, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace_of(line(1)).write('t')
    with pytest.raises(UserError, match=why):
        program.main(args)
    assert [path.name for path in tmp_path.iterdir()] == ['t']


def test_an_interrupted_replay_keeps_its_records_and_waits_for_no_reply(tmp_path, monkeypatch):
    def gate(number):
        if number == 1:
            threading.Event().wait(30)

    def interrupted(replay):  # the user presses Ctrl-C amid the second request
        return run(replay, watch)

    def watch():
        raise KeyboardInterrupt
    run = Replay.run
    monkeypatch.setattr(program, 'Client', lambda *args, **kwargs: Fake(gate=gate))
    monkeypatch.setattr(Replay, 'run', interrupted)
    trace_of(line(3)).write(tmp_path / 't')
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        program.main(['replay', f'{tmp_path / "t"}', '--url=x', '--users=1', '--ids=50:90',
                      f'--records={tmp_path / "records"}'])
    assert time.perf_counter() - start < 15
    assert len((tmp_path / 'records').read_text().splitlines()) == 1
