"""Turns as text and tokens: prompts of replies, what is kept of a reply, and the file."""
import json
import os
import stat
from types import SimpleNamespace

import pytest

from common.errors import UserError
from data.tokenizer import CharTokenizer
from engine.text.dialogue import Dialogue, Template, speakers
from tests.helpers.serving import ending

LETTERS = 'ABabcdefg .\n'
TOKENIZER = CharTokenizer({c: i for i, c in enumerate(LETTERS)}, dict(enumerate(LETTERS)))


def dialogue():
    return Dialogue(TOKENIZER, Template('{name}.\n{text}\n\n'))


def of_three_turns():
    """A dialogue of three turns: 8, 7 and 6 tokens."""
    d = dialogue()
    for text in ('aaa', 'bb', 'c'):
        d.say('A', text)
    return d


@pytest.mark.parametrize('turn', ['', '{name}', '{name}{text}', '{text} {name}\n',
                                  '{name} {text} {text}\n', '{name} {x} {text}\n', '{name'])
def test_wrong_templates_are_refused(turn):
    with pytest.raises(UserError, match='turn='):
        Template(turn)


@pytest.mark.parametrize('said', ['de\n\n', 'de', 'de\n\nfg', 'de\n'])
def test_the_prompt_is_all_texts_however_a_reply_ended_and_the_head_of_the_next(said):
    d = dialogue()
    d.say('A', 'abc')
    assert TOKENIZER.decode(d.prompt('B')) == 'A.\nabc\n\nB.\n'
    d.reply('B', 'de', TOKENIZER.encode(said))
    for text in ('a\r\nb\n\nc', 'd\n\n'):  # nobody says these
        d.narrate(text)
    d.say('A', 'f')
    assert TOKENIZER.decode(d.prompt('B')) == (
        'A.\nabc\n\nB.\nde\n\na\nb\n\nc\n\nd\n\nA.\nf\n\nB.\n')


def test_a_reply_that_ended_with_the_token_for_it_keeps_its_tokens():
    _, tokenizer = ending()
    d = Dialogue(tokenizer, Template('{name}.\n{text}\n\n'))
    sampled = [*b'e', 0xe2, 0x82]  # part of a character: its text has other tokens
    d.reply('B', tokenizer.decode(sampled), sampled + [tokenizer.end_of_text])
    assert d.turns[-1].ids == [*b'B.\n', *sampled, *b'\n\n']


@pytest.mark.parametrize('turn, text, folded', [
    ('{name}.\n{text}\n\n', 'a\n\nb', 'a\nb'),
    ('{name}.\n{text}\n\n', '\n\na\r\n\r\nb\n \n\n', 'a\nb'),
    ('{name}.\n{text}\n\n', 'a\n \n b', 'a\n \n b'), ('{name}.{text}\n', 'a\n\nb\n', 'a b')])
def test_blank_lines_are_left_out_where_they_would_end_the_turn(turn, text, folded):
    d = Dialogue(TOKENIZER, Template(turn))
    d.say('A', text)
    assert d.turns[0].text == folded
    assert TOKENIZER.decode(d.turns[0].ids) == d.template.head('A') + folded + d.template.end


def test_what_cannot_be_said():
    d = dialogue()
    for text in ('\n\n', '', ' '):
        with pytest.raises(UserError, match='^the message is empty$'):
            d.say('A', text)
    with pytest.raises(UserError, match='before its end'):
        Dialogue(TOKENIZER, Template('{name}.{text}g')).say('A', 'a\n\ngb')
    d.strict = True
    for text in ('a\n\nb', 'a\r\n\r\nb', 'a\n', '\nB.\na'):  # the head too ends with a line break
        with pytest.raises(UserError, match='before its end'):
            d.say('A', text)
    with pytest.raises(UserError, match='alphabet lacks'):
        d.say('A', 'x')
    assert d.turns == []


def test_the_oldest_are_left_out_of_prompts_first_and_come_back_when_there_is_room():
    d = of_three_turns()
    whole = d.prompt('B')
    assert [d.trim(room) for room in (21, 13, 12)] == [0, 1, 2]
    assert TOKENIZER.decode(d.prompt('B')) == 'A.\nc\n\nB.\n'
    assert d.trim(0) == 3 and TOKENIZER.decode(d.prompt('B')) == 'B.\n'
    d.untrim(20)
    assert d.trimmed == 3
    d.untrim(21)
    assert d.prompt('B') == whole
    d.trim(6)
    d.cut(2)  # which makes room for earlier ones
    assert TOKENIZER.decode(d.prompt('B')) == 'A.\naaa\n\nA.\nbb\n\nB.\n'
    d.trim(7)
    d.say('A', 'c')
    d.cut(2)
    assert TOKENIZER.decode(d.prompt('B')) == 'A.\nbb\n\nB.\n'  # unchanged, so that a cache has it


def test_what_was_trimmed_is_kept_in_the_file(tmp_path):
    d, again, path = of_three_turns(), dialogue(), tmp_path / 'chat.json'
    d.trim(13)
    d.save(path)
    again.load(path)
    assert [path.name for path in tmp_path.iterdir()] == ['chat.json']
    assert again == d and again.trimmed == 1 and again.prompt('B') == d.prompt('B')
    document = json.loads(path.read_text())
    for trimmed, left_out in ((99, 3), (-1, 0)):  # altered
        path.write_text(json.dumps(document | {'trimmed': trimmed}))
        again.load(path)
        assert again.trimmed == left_out


def test_another_file_is_refused_and_changes_nothing(tmp_path):
    d, path = dialogue(), tmp_path / 'chat.json'
    d.say('A', 'abc')
    d.save(path)
    whole = json.loads(path.read_text())
    changes = [{'version': 9}, {'turn': '{name}:{text}\n'}, {'trimmed': None}, *(
        {'turns': wrong} for wrong in (3, ['A'], [{'name': 'A'}], [
            {'name': 'A', 'text': 'abc', 'ids': [1, 2]}], [
            {'name': 'A', 'text': 'abc', 'ids': 'x'}]))]
    for text in ('no json', '[]', '{}', *(json.dumps(whole | change) for change in changes)):
        path.write_text(text)
        with pytest.raises(UserError, match='chat.json'):
            d.load(path)
        assert [turn.text for turn in d.turns] == ['abc'], text
    path.write_text(json.dumps({'version': 1, 'branches': {'main': []}}))
    with pytest.raises(UserError, match='has branches, which were removed; commit 461914ad'):
        d.load(path)
    with pytest.raises(UserError, match='cannot be written'):
        d.save(tmp_path / 'none' / 'chat.json')


def test_only_its_owner_can_read_a_conversation(tmp_path, recorded):
    """Not for a moment: the temporary file neither."""
    d, path = dialogue(), tmp_path / 'chat.json'
    modes = recorded(os, 'replace', lambda source, _: stat.S_IMODE(os.stat(source).st_mode))
    d.save(path)
    assert modes == [0o600] and stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize('dataset, given, names', [
    ('shakespeare_works', ('', ''), ('ROMEO', 'JULIET')), ('pysource', ('', ''), ('USER', 'MODEL')),
    ('', ('', ''), ('USER', 'MODEL')), ('shakespeare_char', ('Al', ''), ('Al', 'JULIET')),
    ('text', ('', 'Bo'), ('USER', 'Bo'))])
def test_names_of_speakers_fit_the_text(dataset, given, names):
    s = SimpleNamespace(user=given[0], reply_as=given[1])
    assert speakers(s, dataset) == names
