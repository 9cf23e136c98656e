"""Records of replays: their files, their numbers, and a replay against our own server."""
import json

import pytest

from config.errors import UserError
from lab.sessions import __main__ as program
from lab.sessions.client import Answer, Failed
from lab.sessions.presets import make
from lab.sessions.replay import Replay, TextPrompts, measured, percentiles
from tests.helpers.sessions import Fake, ids_of, interrupted, line, trace_of
from tests.serving.conftest import Running

# -- records files ---------------------------------------------------------------------------------

@pytest.mark.parametrize('users', [1, 0])
def test_an_interrupted_replay_goes_on(tmp_path, users):
    trace, path = trace_of(*(line(3, at=0.1 * k) for k in range(4))), tmp_path / 'r'
    with interrupted(trace, Fake(gate=7), users=users, save=str(path)):
        head, *done = map(json.loads, path.read_text().splitlines())
        records = [record for session in done for record in session]
        assert len(done) == 2 if users else len(done) < 4
        assert [len(session) for session in done] == [3] * len(done)
        client = Fake()
        replay = Replay(trace, client, ids_of(trace), users=users, save=str(path))
        found = replay.run()
        assert len(client.asked) == 12 - len(records) and found['resumed'] == bool(records)
        assert found['ended'] == 12 and found['failed'] == 0
        assert found['prompt_tokens'] == 4 * (3 + 8 + 13) and found['reply_tokens'] == 24
        all_of = sorted((r['session'], r['request']) for r in replay.records)
        assert all_of == [(k, i) for k in range(4) for i in range(3)]
        assert min(r['sent'] for r in replay.records[len(records):]) >= max(
            (r['ended'] for r in records), default=0.0)  # its time goes on too
        client = Fake()
        again = Replay(trace, client, ids_of(trace), users=users, save=str(path)).run()
        assert client.asked == [] and again == found | {'resumed': True}


def test_what_fails_after_an_interruption_is_not_a_record(tmp_path):
    """The program stops the server that it started, then."""
    trace, path, client = trace_of(line(3), line(3)), tmp_path / 'r', Fake(gate=4)
    with interrupted(trace, client, users=1, save=str(path)):
        kept = path.read_text()
    assert path.read_text() == kept and len(client.asked) == 5


def test_sessions_with_failures_start_again(tmp_path):
    def gate(number):
        if number == 4:  # the second request of the second session
            raise Failed('status 500')
    trace, path = trace_of(line(3), line(3), line(3)), tmp_path / 'r'
    found = Replay(trace, Fake(gate=gate), ids_of(trace), users=1, save=str(path)).run()
    assert (found['ended'], found['failed']) == (7, 2)
    client = Fake()
    again = Replay(trace, client, ids_of(trace), users=1, save=str(path)).run()
    assert len(client.asked) == 3 and (again['ended'], again['failed']) == (9, 0)
    numbers = [json.loads(text)[0]['session'] for text in path.read_text().splitlines()[1:]]
    assert sorted(numbers) == [0, 1, 2]


def test_ctrl_c_says_what_was_kept(tmp_path, monkeypatch, capsys):
    trace_of(line(2)).write(tmp_path / 't')

    def run(replay, show):
        replay.records.append({})
        raise KeyboardInterrupt
    monkeypatch.setattr(Replay, 'run', run)
    monkeypatch.setattr(program, 'client_of', lambda args, url: Fake())
    for more, said in (((), '--records would'), ((f'--records={tmp_path / "r"}',), 'goes on from')):
        with pytest.raises(KeyboardInterrupt):
            program.main(['replay', str(tmp_path / 't'), '--url=h', '--users=1', *more])
        assert (error := capsys.readouterr().err).startswith('1 of 2 requests') and said in error


def test_a_replay_that_was_not_interrupted_is_not_resumed(tmp_path):
    trace, path = trace_of(line(2)), tmp_path / 'r'
    found = Replay(trace, Fake(), ids_of(trace), users=1, save=str(path)).run()
    assert not found['resumed'] and len(path.read_text().splitlines()) == 2
    path.write_text(path.read_text().splitlines()[0] + '\n')  # interrupted in its first session
    found = Replay(trace, Fake(), ids_of(trace), users=1, save=str(path)).run()
    assert not found['resumed'] and found['ended'] == 2


def test_records_of_another_replay(tmp_path):
    trace, path = trace_of(line(2)), str(tmp_path / 'r')
    Replay(trace, Fake(), ids_of(trace), users=1, save=path).run()
    other = Fake()
    other.model = lambda: 'other'
    seed = trace_of(line(2))
    seed.seed = 2
    with pytest.raises(UserError, match='another replay: users=1, not 2$'):
        Replay(trace, Fake(), ids_of(trace), users=2, save=path)
    for wrong in (
            lambda: Replay(trace, Fake(), ids_of(trace), users=1, rate=2.0, save=path),
            lambda: Replay(trace, Fake(), TextPrompts(trace, {}), users=1, save=path),
            lambda: Replay(trace, other, ids_of(trace), users=1, save=path),
            lambda: Replay(seed, Fake(), ids_of(seed), users=1, save=path),
            lambda: Replay(trace_of(line(3)), Fake(), ids_of(trace), users=1, save=path)):
        with pytest.raises(UserError, match='another replay'):
            wrong()
    assert Replay(trace, Fake(), ids_of(trace), users=1, save=path).run()['ended'] == 2


@pytest.mark.parametrize('more', [b'\xff\n', b'{}\n{}\n', b'[{}]\n', b'[5]\n', b'5\n'])
def test_broken_records(tmp_path, more):
    trace, path = trace_of(line(2)), tmp_path / 'r'
    Replay(trace, Fake(), ids_of(trace), users=1, save=str(path)).run()
    path.write_bytes(path.read_bytes() + more)
    with pytest.raises(UserError, match='not the file of a replay'):
        Replay(trace, Fake(), ids_of(trace), users=1, save=str(path))


def test_a_line_that_was_not_written_to_its_end(tmp_path):
    trace, path = trace_of(line(2), line(1)), tmp_path / 'r'
    Replay(trace, Fake(), ids_of(trace), users=1, save=str(path)).run()
    whole = path.read_text()
    path.write_text(whole[:-20])
    client = Fake()
    found = Replay(trace, client, ids_of(trace), users=1, save=str(path)).run()
    assert found['resumed'] and found['ended'] == 3 and len(client.asked) == 1
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize('text', ['', '[]\n', 'x\n', '5'])
def test_files_that_are_no_records(tmp_path, text):
    trace, path = trace_of(line(2)), tmp_path / 'r'
    path.write_text(text)
    for where in (path, tmp_path):
        with pytest.raises(UserError, match='replay'):
            Replay(trace, Fake(), ids_of(trace), users=1, save=str(where))
    assert path.read_text() == text


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
    _, *done = map(json.loads, (tmp_path / 'r').read_text().splitlines())
    records = [record for session in done for record in session]
    lengths = {(s.number, i): r.reply for s in trace.sessions for i, r in enumerate(s.requests)}
    assert {(r['session'], r['request']): r['reply'] for r in records} == lengths
    assert (found['failed'], found['ended'], found['model']) == (0, trace.n_requests, 'tiny')
    assert found['reply_tokens'] == replies and found['refused'] == 0
    assert found['over_unavoidable'] == 1.0 and 0 < found['computed'] < found['prompt_tokens']
    assert found == json.loads((tmp_path / 'f.json').read_text())
    assert replayed(capsys, *args, f'--records={tmp_path / "r"}')['resumed']
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
    (['--set', 'sessions=0', '--save=t'], 'sessions=0'), (['--save=none/t'], 'no folder')])
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


def test_records_that_cannot_be_written():
    trace = trace_of(line(1))
    with pytest.raises(UserError, match='cannot be written'):
        Replay(trace, Fake(), ids_of(trace), users=1, save='/none/such/r')
