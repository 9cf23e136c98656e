"""Traces: what a seed gives, what files say, and what no cache can save."""
import json
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.errors import UserError
from lab.sessions import __main__ as program
from lab.sessions import trace as traces
from lab.sessions.known import Known
from lab.sessions.presets import PRESETS, make
from lab.sessions.simulate import simulate, texts, unavoidable
from lab.sessions.trace import Trace
from tests.helpers.sessions import common

SHIPPED = Path(program.__file__).parent / 'traces'


@pytest.mark.parametrize('name', PRESETS)
def test_the_shipped_trace_is_what_its_preset_makes_and_says_all_of_it(name, tmp_path):
    shipped, path = (SHIPPED / f'{name}.jsonl').read_bytes(), tmp_path / 't.jsonl'
    program.main(['make', name, f'--save={path}'])
    assert path.read_bytes() == shipped
    Trace.read(path).write(path)
    assert path.read_bytes() == shipped
HEAD = {'format': traces.FORMAT, 'name': 'x', 'seed': 1, 'systems': [5]}


def written(folder, lines):
    (folder / 't').write_text('\n'.join(map(json.dumps, lines)))
    return folder / 't'


@pytest.mark.parametrize('lines, expected', [
    ([], 'not enough'), ([HEAD | {'format': 'y'}], 'its format'),
    ([HEAD, {'session': 0, 'system': 0, 'requests': [{'at': 0}]}], 'missing')])
def test_files_that_are_no_traces(tmp_path, lines, expected):
    with pytest.raises(UserError, match=f'is not a trace.*{expected}'):
        Trace.read(written(tmp_path, lines))


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=12))
def test_the_longest_known_prefix(sequences):
    known = Known()
    for i, tokens in enumerate(sequences):
        longest = max((common(tokens, other) for other in sequences[:i]), default=0)
        assert known.prefix(tokens) == longest
        assert known.unavoidable(tokens) == len(tokens) - min(longest, len(tokens) - 1) >= 1
        known.add(tokens)


def test_what_no_cache_can_save(tmp_path):
    """A system prompt of 5; a turn, the next one, the first one changed after 2 tokens, another
    reply to that, and another user."""
    requests = [dict(at=0, after=-1, message=7, reply=4), dict(at=1, after=0, message=3, reply=2),
                dict(at=2, after=-1, message=6, reply=3, kind='edit', like=0, keep=2),
                dict(at=3, after=-1, message=6, reply=3, kind='regenerate', like=2, keep=6)]
    lines = [HEAD, {'session': 0, 'system': 0, 'requests': requests},
             {'session': 1, 'system': 0, 'requests': [dict(at=9, after=-1, message=8, reply=1)]}]
    trace = Trace.read(written(tmp_path, lines))
    lengths = [len(prompt) for prompt, _ in texts(trace)]
    assert lengths == [12, 19, 11, 11, 13] and trace.longest == 21
    # the last token of the reply, whose K and V were not computed, comes with the next message
    assert unavoidable(trace) == {'prompt_tokens': 66, 'reply_tokens': 13,
                                  'unavoidable': 12 + (1 + 3) + 4 + 1 + 8}


def test_a_changed_preset(tmp_path, capsys):
    path = tmp_path / 't'
    program.main(['make', 'chat', '--seed=4', '--set', 'sessions=3', '--set', 'systems=[9,8]',
                  f'--save={path}'])
    trace = Trace.read(path)
    assert len(trace.sessions) == 3 and trace.systems == [9, 8] and trace.seed == 4
    assert f'{trace.n_requests} requests of 3 sessions' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        program.main(['make', 'chat', '--set', 'edit=x', f'--save={path}'])
    assert '--set' in capsys.readouterr().err


def test_a_replay_on_the_prefix_cache(tmp_path, monkeypatch):
    """With all memory nothing is recomputed that need not be; with less, more."""
    path = tmp_path / 't'
    make('forking', 2, sessions=3, longest=400, message=20, reply=30, systems=(40,)).write(path)
    monkeypatch.setattr(program, 'simulate', partial(simulate, kv_dtype='float32', page_size=16))
    program.main(['simulate', str(path), '--config=config/train_mqa_local.py', '--shares=30',
                  f'--save={tmp_path / "f.json"}'])
    [found] = json.loads((tmp_path / 'f.json').read_text())['traces']
    whole, part = found['cells']
    assert whole['computed'] == found['unavoidable'] and whole['evicted'] == 0
    assert part['computed'] > whole['computed'] and part['over_unavoidable'] > 1
    assert part['most_nbytes'] < 0.4 * whole['most_nbytes']
    assert part['over_unavoidable'] == part['computed'] / whole['computed']
