"""chat.py: lines in, replies out; the conversation survives interrupts, errors and restarts."""
import builtins
import io
import json

import pytest
import torch

import chat
from engine.engine import Engine
from tests.helpers.serving import ending
from tests.programs.support import flags

NAMES = dict(user='a', reply_as='b', turn='{name}c{text}d', max_new_tokens=20, max_seq_len=200,
             temperature=1.0, device='cpu')


@pytest.fixture
def talk(monkeypatch, capsys, trained, tmp_path):
    """`talk(lines, **settings)` runs chat.py and returns its output."""
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

    def turns():
        document = json.loads((tmp_path / 'chat.json').read_text())
        return [(turn['name'], turn['text']) for turn in document['turns']]
    run.turns = turns
    return run


def test_turns_are_kept_and_continued(talk):
    out = talk(['ab', '', KeyboardInterrupt, 'ba', '/stats', '/history'])
    turns = talk.turns()
    assert [name for name, _ in turns] == ['a', 'b', 'a', 'b']
    assert [turns[0][1], turns[2][1]] == ['ab', 'ba'] and all('d' not in text for _, text in turns)
    assert ''.join(f'{name}c{text}d' for name, text in turns) in out.splitlines()[-1]
    assert '2 replies: ' in out and 'held between turns' in out
    out = talk(['ba', '/quit', 'never read'])
    assert '(going on with 4 turns' in out and talk.turns()[:4] == turns and len(talk.turns()) == 6


@pytest.mark.parametrize('errors', ['strict', 'surrogateescape'])  # depends on the locale
def test_bytes_that_are_not_utf8_are_replacement_characters(monkeypatch, tmp_path, errors):
    """And a reply that is only the token for its end is empty."""
    monkeypatch.setattr(chat, 'load', lambda *_: (*ending(), ''))
    monkeypatch.setattr(chat, 'with_newest_run', lambda s: s)
    lines = io.BytesIO(b'\xef\xbb\xbfcaf\xe9\nho\n')  # a byte order mark
    monkeypatch.setattr('sys.stdin', io.TextIOWrapper(lines, 'utf-8', errors))
    chat.main(flags(NAMES | dict(history=tmp_path / 'h', max_seq_len=60, reply_as='b\udce9')))
    turns = json.loads((tmp_path / 'h').read_text())['turns']
    said = [(turn['name'], turn['text']) for turn in turns]
    assert said == [('a', 'caf\ufffd'), ('b\ufffd', ''), ('a', 'ho'), ('b\ufffd', '')]


def test_commands(talk):
    out = talk(['/retry', '/undo', '/stats', 'ab', 'ba', '/undo', '/fork x', 'no such letters: Q',
                '/help'])
    for said in ('(/retry: you have said nothing yet)', '(0 turns)', 'no reply yet', '(2 turns)',
                 '(/fork: no such command', "alphabet lacks", '/edit TEXT'):
        assert said in out, said
    assert len(talk.turns()) == 2


def test_ctrl_c_ends_a_reply_and_keeps_its_text(talk, interrupt, tmp_path):
    # without an interrupt it would continue: fghij...
    settings = dict(turn='{name}e{text}d', temperature=0, max_new_tokens=60)
    whole = talk(['ab'], history=tmp_path / 'other.json', **settings)
    interrupt('engine.engine.Engine.step', {2: 'before'}.get)
    talk(['ab', 'ba'], **settings)
    turns = talk.turns()
    assert len(turns) == 4 and len(turns[1][1]) == 1 and f'be{turns[1][1]}' in whole
    assert f'be{turns[1][1]}\n' not in whole


def test_a_failed_reply_takes_its_turn_back(talk, monkeypatch):
    talk(['ab'])
    before = talk.turns()
    plain = Engine._sample

    def sample(engine, parts, logits):
        return plain(engine, parts, logits * torch.nan)
    monkeypatch.setattr(Engine, '_sample', sample)
    out = talk(['ba', '/history'])
    assert 'not finite' in out and talk.turns() == before and out.splitlines()[-1].count('ac') == 1
