"""chat.py: lines in, replies out; what it computes anew is little, what it keeps survives."""
import builtins
import json
import re

import pytest
import torch

import chat
from config.errors import UserError
from engine.engine import Engine
from tests.programs.support import flags

NAMES = dict(user='a', reply_as='b', turn='{name}c{text}d', max_new_tokens=20, max_seq_len=200,
             temperature=1.0, device='cpu')


@pytest.fixture
def talk(monkeypatch, capsys, trained, tmp_path):
    """`talk(lines, **settings)`: what it prints."""
    def run(lines, **settings):
        given = iter(lines)

        def answer(_):
            line = next(given, None)
            if line is None:
                raise EOFError
            if line is KeyboardInterrupt:
                raise KeyboardInterrupt
            return line
        monkeypatch.setattr(builtins, 'input', answer)
        settings = dict(NAMES, out_dir=trained['full'], history=tmp_path / 'chat.json') | settings
        capsys.readouterr()
        chat.main(flags(settings))
        return capsys.readouterr().out

    def turns(branch='main'):
        document = json.loads((tmp_path / 'chat.json').read_text())
        return [(turn['name'], turn['text']) for turn in document['branches'][branch]]
    run.turns = turns
    return run


def test_turns_are_replied_to_and_kept(talk):
    out = talk(['ab', '', KeyboardInterrupt, 'ba', '/stats', '/history'])
    turns = talk.turns()
    assert [name for name, _ in turns] == ['a', 'b', 'a', 'b']
    assert [turns[0][1], turns[2][1]] == ['ab', 'ba']
    assert ''.join(f'{name}c{text}d' for name, text in turns) in out.splitlines()[-1]
    assert '2 replies: ' in out and 'held between turns' in out
    assert '(/quit or Ctrl-D leaves)' in out
    assert all('d' not in text for _, text in turns)


def test_it_goes_on_where_it_was(talk):
    talk(['ab'])
    first = talk.turns()
    out = talk(['ba', '/quit', 'never read'])
    assert '(going on with 2 turns' in out and talk.turns()[:2] == first and len(talk.turns()) == 4


def test_the_next_time_its_past_is_on_disk(talk, tmp_path):
    talk(['ab' * 40, '/stats'], prefix_folder=tmp_path / 'prefixes', max_seq_len=400)
    out = talk(['ba' * 10, '/stats'], prefix_folder=tmp_path / 'prefixes', max_seq_len=400)
    assert int(re.search(r'1 reply: (\d+) of \d+ prompt tokens reused', out)[1]) >= 64


def test_replies_are_those_without_a_store(talk, monkeypatch, tmp_path):
    """Three turns, a retry, an edit: the same texts as when all is computed anew each time."""
    lines, seen, plain = ['ab', 'ba', '/retry', '/edit bb', 'aa'], {}, Engine.__init__
    for budget in (10 ** 8, 0):
        def init(self, *args, budget=budget, **kinds):
            plain(self, *args, **kinds | dict(prefix_budget=budget, page_size=8))
        monkeypatch.setattr(Engine, '__init__', init)
        (tmp_path / 'chat.json').unlink(missing_ok=True)
        talk(lines, dtype='float32')
        seen[budget] = talk.turns()
    assert seen[0] == seen[10 ** 8] and [name for name, _ in seen[0]] == ['a', 'b'] * 3


def test_commands(talk):
    out = talk(['/retry', '/undo', '/stats', 'ab', '/fork x', 'ba', '/branches', '/switch main',
                '/undo', '/bogus', '/switch y', 'no such letters: Q', '/help'])
    for said in ('(/retry: you have said nothing yet)', 'no reply yet', '* x: 4 turns',
                 '  main: 2 turns', "(2 turns on branch 'main')", "(0 turns on branch 'main')",
                 '(/bogus: no such command', "there is no branch 'y'", "alphabet lacks",
                 '/edit TEXT'):
        assert said in out, said
    assert talk.turns() == [] and len(talk.turns('x')) == 4


def test_edit_takes_the_place_of_the_last_turn(talk):
    talk(['ab', 'ba', '/edit bb'])
    assert [text for name, text in talk.turns() if name == 'a'] == ['ab', 'bb']


def test_ctrl_c_ends_a_reply_and_keeps_what_was_said(talk, monkeypatch, tmp_path):
    plain, steps = Engine.step, iter(range(100))

    def step(engine):
        if next(steps) == 1:
            raise KeyboardInterrupt
        return plain(engine)
    # of itself it would go on: fghij...
    settings = dict(turn='{name}e{text}d', temperature=0, max_new_tokens=60)
    whole = talk(['ab'], history=tmp_path / 'other.json', **settings)
    monkeypatch.setattr(Engine, 'step', step)
    talk(['ab', 'ba'], **settings)
    turns = talk.turns()
    assert len(turns) == 4 and len(turns[1][1]) == 1 and f'be{turns[1][1]}' in whole
    assert f'be{turns[1][1]}\n' not in whole


def test_a_reply_that_fails_takes_its_turn_back(talk, monkeypatch):
    talk(['ab'])
    before = talk.turns()
    plain = Engine._sample

    def sample(engine, parts, logits, events):
        return plain(engine, parts, logits * torch.nan, events)
    monkeypatch.setattr(Engine, '_sample', sample)
    out = talk(['ba', '/history'])
    assert 'not finite' in out and talk.turns() == before and out.splitlines()[-1].count('ac') == 1


def test_what_is_longer_than_the_context_is_left_out_of_prompts_alone(talk, monkeypatch):
    submitted, plain = [], Engine.submit
    monkeypatch.setattr(Engine, 'submit',
                        lambda engine, prompt, params: submitted.append(len(prompt))
                        or plain(engine, prompt, params))
    out = talk(['ab' * 5] * 12, max_seq_len=100)
    assert 0 < out.count('it sees turns ') < 6  # much at once, and seldom
    assert sum(len(f'{name}c{text}d') for name, text in talk.turns()) > 200
    assert max(submitted) <= 100
    assert len(talk.turns()) == 24
    assert [text for name, text in talk.turns() if name == 'a'] == ['ab' * 5] * 12
    out = talk(['ab', '/history'], max_seq_len=100)
    assert 'going on with 24 turns' in out and len(talk.turns()) == 26 and submitted[-1] <= 100
    assert out.count('ac' + 'ab' * 5 + 'd') >= 12
    assert '(your turn is longer than half of' in talk(['ab' * 60], max_seq_len=100)


def test_what_goes_wrong_loses_no_turn(talk):
    talk(['ab', 'ba'])
    before = talk.turns()
    # (who has said nothing)
    out = talk(['/edit Q', '/edit ' + 'ab' * 90, 'ab' * 90, '/undo', '/retry'], user='j')
    assert out.count('/edit: you have said nothing yet') == 2 and 'longer than half' in out
    assert '(4 turns' in out
    assert talk.turns() == before
    out = talk(['/edit Q', '/edit ' + 'ab' * 90])
    assert 'alphabet lacks' in out and 'longer than half' in out and talk.turns() == before
    # the oldest go for turns that fit, not for one that does not
    talk(['ab' * 30, 'ba' * 30, 'ab' * 43, 'ab' * 100])
    assert talk.turns()[-2][1] == 'ab' * 43


def test_ctrl_c_while_the_last_piece_is_printed(talk, monkeypatch):
    plain, ended = Engine.step, []

    def step(engine):
        events = plain(engine)
        ended.extend(event.completion for event in events if event.completion)
        return events
    printed = builtins.print

    def interrupted(*args, **kinds):
        if kinds.get('end') == '' and len(ended) == 1:
            ended.append(None)
            raise KeyboardInterrupt
        printed(*args, **kinds)
    monkeypatch.setattr(Engine, 'step', step)
    monkeypatch.setattr(builtins, 'print', interrupted)
    talk(['ab'])
    assert talk.turns() == [('a', 'ab'), ('b', ended[0].text)]


def test_wrong_settings(talk):
    with pytest.raises(UserError, match='turn='):
        talk([], turn='x')
    with pytest.raises(UserError, match='alphabet lacks'):
        talk([], user='Q')
    with pytest.raises(UserError, match='prefix_budget'):
        talk([], prefix_budget='much')
