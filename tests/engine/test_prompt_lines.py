"""Files of many prompts: which lines are accepted, and that a wrong line affects no other."""
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.errors import UserError
from data.tokenizer import CharTokenizer
from engine.text.prompts import PromptLine, encode_lines, read_lines


@pytest.fixture
def lines_in(tmp_path):
    """Return a function that reads the prompts from a file with the given content."""
    def read(content, name='many.jsonl'):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_lines(str(path))
    return read


def test_lines_of_strings_and_of_objects(lines_in, tmp_path):
    a, b, c, d = lines_in('\ufeff"one\\ntwo"\n\n  {"prompt": "p"}\r\n'
                          '{"prompt": "\\u20ac\\ud83d\\ude00"}\n{"prompt": "a\\udc00b"}')
    where = f"prompts={str(tmp_path / 'many.jsonl')!r}, line "
    assert a == PromptLine(where + '1', 1, 'one\ntwo')
    assert b == PromptLine(where + '3', 3, 'p')
    assert c == PromptLine(where + '4', 4, '€😀')
    assert d == PromptLine(where + '5', 5, 'a\ufffdb')  # half a surrogate pair


@pytest.mark.parametrize('name', ['p.txt', 'p.json'])
def test_other_files_have_one_prompt_a_line_to_the_letter(lines_in, name):
    lines = lines_in('{"prompt": "a"}\n\n b \u2028c\r\n"d"\n', name)
    assert [line.prompt for line in lines] == ['{"prompt": "a"}', ' b \u2028c', '"d"']
    assert [line.line_number for line in lines] == [1, 3, 4]
    assert all(line.error == '' for line in lines)


WRONG = {
    'a': ['not JSON', "'a'"], '{"prompt": "a"} x': ['not JSON'], '"a\tb"': ['not JSON'],
    '{"prompt":' * 100_000: ['not JSON', 'recursion'], '9' * 5000: ['not JSON', 'digits'],
    '5': ['JSON string', "'5'"], '["a"]': ['JSON string'], '{}': ['"prompt"'],
    'NaN': ['JSON string'], '{"prompt": null}': ['"prompt"'], '{"prompt": ["a"]}': ['"prompt"'],
    '""': ['at least one character'],
    '{"prompt": "a", "temperature": 0.5}': ["unknown key 'temperature'", '"prompt" alone', 'flags'],
    '{"id": 7}': ["unknown key 'id'"], '{"prompt": "a", "\\ud800": 1}': ['unknown key', '\ufffd']}


@pytest.mark.parametrize('wrong', WRONG, ids=lambda line: line[:40])
def test_a_wrong_line_says_so_and_the_others_run(lines_in, tmp_path, wrong):
    first, bad, last = lines_in(f'"first"\n\n{wrong}\n{{"prompt": "last"}}\n')
    assert (first.prompt, first.error, last.prompt, last.error) == ('first', '', 'last', '')
    assert bad.error.startswith(f"prompts={str(tmp_path / 'many.jsonl')!r}, line 3: ")
    assert (bad.line_number, bad.prompt) == (3, '')
    rest = bad.error.removeprefix(bad.where)
    assert '\n' not in rest and len(rest) < 400
    rest.encode()
    for text in WRONG[wrong]:
        assert text in rest


@pytest.mark.parametrize('content, name, error', [
    (' \n\n', 'p.jsonl', 'no prompts'), ('', 'p.txt', 'no prompts'),
    (b'"caf\xe9"\n', 'p.jsonl', 'UTF-8')])
def test_a_file_without_prompts_is_refused(lines_in, tmp_path, content, name, error):
    with pytest.raises(UserError, match=error) as caught:
        lines_in(content, name)
    assert repr(str(tmp_path / name)) in str(caught.value)
    with pytest.raises(UserError, match='cannot be read'):
        read_lines('no/such.jsonl')


def test_prompts_that_the_alphabet_lacks_get_an_error_of_their_own(lines_in):
    tokenizer = CharTokenizer({'a': 0, 'b': 1}, {0: 'a', 1: 'b'})
    read = lines_in('"ab"\n{"prompt": "aXb"}\nwrong\n"b"\n')
    lines = encode_lines(tokenizer, read)
    assert [list(line.ids) for line in lines] == [[0, 1], [], [], [1]] and lines[2] == read[2]
    assert lines[1].error.startswith(f"{read[1].where}: ") and "'X'" in lines[1].error
    assert (lines[1].prompt, lines[3].error) == ('aXb', '') and read[1].error == ''


KEYS = st.sampled_from(['prompt', 'id', 'x'])
VALUES = st.recursive(st.none() | st.booleans() | st.integers(-3, 300) | st.floats()
                      | st.text(max_size=4), lambda inner: st.lists(inner, max_size=2)
                      | st.dictionaries(KEYS, inner, max_size=2))
LINES = VALUES.map(json.dumps) | st.text(max_size=20).map(
    lambda text: text.replace('\n', '').replace('\r', ''))


@given(lines=st.lists(LINES.filter(str.strip), min_size=1, max_size=5))
def test_whatever_the_lines_are_each_is_a_prompt_or_an_error(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp('lines') / 'p.jsonl'
    path.write_text('\n'.join(['"first"', *lines]), encoding='utf-8', errors='replace',
                    newline='\n')
    read = read_lines(str(path))
    assert [line.line_number for line in read] == list(range(1, len(lines) + 2))
    for line in read:
        assert bool(line.prompt) != bool(line.error) and '\n' not in line.error
        json.dumps({'prompt': line.prompt, 'error': line.error}).encode()
