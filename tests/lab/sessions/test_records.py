"""Records of replays: their numbers, and a replay against our own server."""
import json

import pytest

from config.errors import UserError
from lab.sessions import __main__ as program
from lab.sessions.client import Answer, Failed
from lab.sessions.presets import make
from lab.sessions.replay import Replay, measured, percentiles
from tests.helpers.sessions import Fake, ids_of, interrupted, line, trace_of
from tests.serving.conftest import Running

# -- interruptions -------------------------------------------------------------------------------

def test_what_fails_after_an_interruption_is_not_a_record():
    """The program stops the server that it started, then."""
    trace, client = trace_of(line(3), line(3)), Fake(gate=4)
    with interrupted(trace, client, users=1) as replay:
        assert len(replay.records) == 4
    assert len(replay.records) == 4 and len(client.asked) == 5


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
    assert found['tpot'] == pytest.approx(0.3)
    with pytest.raises(Failed):
        measured(Answer(10.0), 1.0)


def test_percentiles():
    assert percentiles(list(range(101))[::-1]) == {'p50': 50, 'p95': 95, 'p99': 99, 'max': 100}
    assert percentiles([0.5]) == dict.fromkeys(('p50', 'p95', 'p99', 'max'), 0.5)
    assert percentiles([]) == {}


def test_a_summary():
    """Of three replies and a failure. Only some say what was cached."""
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
    trace = trace_of(*(line(1, at=k, message=4) for k in range(4)))
    client = Made(gate=gate, seconds=0.02)
    replay = Replay(trace, client, ids_of(trace), users=1)
    found = replay.run()
    assert found['unavoidable'] == sum(record['unavoidable'] for record in replay.records[:3])
    assert (found['prompt_tokens'], found['computed'], found['reply_tokens']) == (12, 10, 6)
    assert found['over_unavoidable'] == 10 / found['unavoidable']
    assert (found['ended'], found['failed'], found['errors']) == (3, 1, ['boom'])
    assert found['refused'] == 5
    assert found['ttft_s']['p50'] == pytest.approx(0.2) and found['ttft_s']['max'] == 0.5
    assert found['tpot_s'] == pytest.approx({'p50': 0.25, 'p95': 0.295, 'p99': 0.299, 'max': 0.3})
    assert found['gap_s']['p50'] == pytest.approx(0.2)
    assert found['gap_s']['max'] == pytest.approx(0.4)
    seconds = max(end for _, end in client.spans) - client.spans[0][0]
    assert seconds - 0.001 < found['seconds'] < seconds + 5
    assert found['tokens_per_second'] == pytest.approx(6 / found['seconds'])
    text = program.replay_table(found).title
    assert '3 of 4 requests' in text and '1 failed' in text and 'boom' in text


# -- the program, and our own server ---------------------------------------------------------------

@pytest.fixture
def server():
    made = Running()
    yield made
    made.stop()


def replayed(capsys, *args) -> dict:
    program.main(['replay', *map(str, args)])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_our_server_computes_what_it_must(tmp_path, capsys, server):
    """Its window is as large as a block of the prefix cache, so that it can go on from any token;
    and no part of its store is evicted."""
    trace = make('forking', 3, sessions=3, turns=8.0, message=5, reply=4, systems=(11,), longest=56)
    trace.write(tmp_path / 't')
    replies = sum(r.reply for session in trace.sessions for r in session.requests)
    args = (tmp_path / 't', f'--url=127.0.0.1:{server.port}', '--ids=0:23', '--users=1')
    found = replayed(capsys, *args, f'--save={tmp_path / "f.json"}', f'--records={tmp_path / "r"}')
    records = [*map(json.loads, (tmp_path / 'r').read_text().splitlines())]
    lengths = {(s.number, i): r.reply for s in trace.sessions for i, r in enumerate(s.requests)}
    assert {(r['session'], r['request']): r['reply'] for r in records} == lengths
    assert (found['failed'], found['ended'], found['model']) == (0, trace.n_requests, 'tiny')
    assert found['reply_tokens'] == replies and found['refused'] == 0
    assert found['over_unavoidable'] == 1.0 and 0 < found['computed'] < found['prompt_tokens']
    assert found == json.loads((tmp_path / 'f.json').read_text())
    assert server.metric('requests_total', route='/v1/completions',
                         status='200') == trace.n_requests


def test_a_replay_with_failures_ends_with_status_1(tmp_path, capsys, server):
    trace_of(line(2, message=70)).write(tmp_path / 't')  # longer than the server takes
    with pytest.raises(SystemExit) as raised:
        replayed(capsys, tmp_path / 't', f'--url=127.0.0.1:{server.port}', '--ids=0:23',
                 '--users=1')
    assert raised.value.code == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found['failed'] == 2 and any('70 tokens' in error for error in found['errors'])


@pytest.mark.parametrize('args', [
    ('--users=-1',), ('--rate=0',), ('--timeout=0',), ('--ids=5:5',), ('--ids=-1:5',), ('--ids=5',),
    ('--fields=x',), ('--fields=5',), ('--url=ftp://h',), ('--rate=2', '--users=1')], ids=' '.join)
def test_wrong_arguments(tmp_path, args):
    trace_of(line(1)).write(tmp_path / 't')
    url = () if args[0].startswith('--url') else ('--url=http://127.0.0.1:1',)
    with pytest.raises(UserError, match=args[0].lstrip('-').partition('=')[0] + '='):
        program.main(['replay', str(tmp_path / 't'), *url, *args])


@pytest.mark.parametrize('args, match', [
    (['--set', 'sessions=0', '--save=t'], 'sessions=0'), (['--save=none/t'], 'must be a file')])
def test_traces_that_cannot_be_made(args, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=match):
        program.main(['make', 'chat', *args])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('command', ['stall', 'soak'])
def test_other_commands_say_that_the_server_does_not_answer(command):
    with pytest.raises(UserError, match='refused'):
        program.main([command, '--url=http://127.0.0.1:1'])


def test_a_server_that_is_not_there(tmp_path):
    trace_of(line(1)).write(tmp_path / 't')
    with pytest.raises(UserError):
        program.main(['replay', str(tmp_path / 't'), '--url=http://127.0.0.1:1'])
