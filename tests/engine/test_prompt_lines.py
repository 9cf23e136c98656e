"""Files of many prompts, each with its own parameters: which lines are accepted, and that a wrong
line affects no other."""
import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.errors import UserError
from data.tokenizer import CharTokenizer
from engine.requests.params import SamplingParams
from engine.text.prompts import PromptLine, encode_requests, read_requests

DEFAULTS = SamplingParams(max_new_tokens=9, temperature=0.5, seed=4, stop=('x',))


@pytest.fixture
def requests(tmp_path):
    """Return a function that reads the requests from a file with the given content."""
    def read(content, name='many.jsonl'):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_requests(str(path), DEFAULTS)
    return read


def test_lines_of_strings_and_of_objects(requests, tmp_path):
    a, b, c = requests('\ufeff"one\\ntwo"\n\n'
                       '  {"prompt": "p", "id": "q-1", "temperature": 0, "top_k": 3}\r\n'
                       '{"stop": ["a", "b"], "prompt": "\\u20ac\\ud83d\\ude00", "id": -1.5}')
    assert a == PromptLine(a.where, 1, None, 'one\ntwo', DEFAULTS)
    assert (b.prompt, b.id, b.given) == ('p', 'q-1', ('temperature', 'top_k'))
    assert (b.error, b.line_number) == ('', 3)
    assert b.params == dataclasses.replace(DEFAULTS, temperature=0, top_k=3)
    assert (c.prompt, c.id, c.given, c.line_number) == ('€😀', -1.5, ('stop',), 4)
    assert c.params == dataclasses.replace(DEFAULTS, stop=('a', 'b'))
    assert c.where == f"prompts={str(tmp_path / 'many.jsonl')!r}, line 4"


def test_fields_that_say_nothing_and_half_a_surrogate_pair(requests):
    line, = requests('{"prompt": "a\\udc00b", "id": "\\ud800", "stop": ["\\ud83d", ""], "seed": -1,'
                     ' "top_k": null, "unknown": [], "stop_tokens": []}')
    assert (line.prompt, line.id, line.given, line.error) == ('a\ufffdb', '\ufffd', ('stop',), '')
    assert line.params == dataclasses.replace(DEFAULTS, stop=('\ufffd',))


@pytest.mark.parametrize('name', ['p.txt', 'p.json'])
def test_other_files_have_one_prompt_a_line_to_the_letter(requests, name):
    lines = requests('{"prompt": "a"}\n\n b \u2028c\r\n"d"\n', name)
    assert [line.prompt for line in lines] == ['{"prompt": "a"}', ' b \u2028c', '"d"']
    assert [line.line_number for line in lines] == [1, 3, 4]
    assert all(line.params == DEFAULTS and line.error == '' and line.id is None for line in lines)


WRONG = {
    'a': ['not JSON', "'a'"], '{"prompt": "a"} x': ['not JSON'], '"a\tb"': ['not JSON'],
    '{"prompt":' * 100_000: ['not JSON', 'recursion'],
    '{"prompt": "a", "seed": ' + '9' * 5000 + '}': ['not JSON', 'digits'],
    '5': ['JSON string, or an object', "'5'"], '["a"]': ['JSON string'], '{}': ['"prompt"'],
    '{"prompt": null}': ['prompt=None'], '{"prompt": ["a"]}': ["prompt=['a']"],
    '""': ["prompt=''", 'at least one character'],
    '{"prompt": "a", "id": [1]}': ['id=[1]'],
    '{"prompt": "a", "\\ud800": 1}': ['unknown key', '\ufffd'],
    '{"prompt": "a", "temperature": NaN}': ['NaN'], '-Infinity': ['-Infinity'],
    '{"prompt": "a", "id": -1e999}': ['-1e999', 'not a finite number'],
    '{"prompt": "a", "top_p": -1}': ['top_p=-1', 'at least 0']}


@pytest.mark.parametrize('wrong', WRONG, ids=lambda line: line[:40])
def test_a_wrong_line_says_so_and_the_others_run(requests, tmp_path, wrong):
    first, bad, last = requests(f'"first"\n\n{wrong}\n{{"prompt": "last", "top_k": 1}}\n')
    assert (first.prompt, first.error) == ('first', '')
    assert (last.prompt, last.params.top_k, last.error) == ('last', 1, '')
    assert bad.error.startswith(f"prompts={str(tmp_path / 'many.jsonl')!r}, line 3: ")
    assert bad.line_number == 3
    assert bad.prompt in ('', 'a') and bad.params == DEFAULTS
    rest = bad.error.removeprefix(bad.where)
    assert '\n' not in rest and len(rest) < 400
    rest.encode()
    for text in WRONG[wrong]:
        assert text in rest


def test_a_wrong_line_keeps_its_id_and_a_prompt_that_can_be_read(requests):
    lines = requests('{"prompt": 1, "id": 7}\n{"prompt": "a", "id": "x", "top_k": -2}\n'
                     '{"id": "no prompt"}\n{"prompt": "b", "temperatur": 1}\nx')
    assert [line.id for line in lines] == [7, 'x', 'no prompt', None, None]
    assert [line.prompt for line in lines] == ['', 'a', '', 'b', '']
    assert all(line.error for line in lines)


@pytest.mark.parametrize('content, name, error', [
    (' \n\n', 'p.jsonl', 'no prompts'), ('', 'p.txt', 'no prompts'),
    (b'"caf\xe9"\n', 'p.jsonl', 'UTF-8')])
def test_a_file_without_prompts_is_refused(requests, tmp_path, content, name, error):
    with pytest.raises(UserError, match=error) as caught:
        requests(content, name)
    assert repr(str(tmp_path / name)) in str(caught.value)
    with pytest.raises(UserError, match='cannot be read'):
        read_requests('no/such.jsonl', DEFAULTS)


def test_prompts_that_the_alphabet_lacks_get_an_error_of_their_own(requests):
    tokenizer = CharTokenizer({'a': 0, 'b': 1}, {0: 'a', 1: 'b'})
    read = requests('"ab"\n{"prompt": "aXb", "id": 5}\nwrong\n"b"\n')
    lines = encode_requests(tokenizer, read)
    assert [list(line.ids) for line in lines] == [[0, 1], [], [], [1]] and lines[2] == read[2]
    assert lines[1].error.startswith(f"{read[1].where}: ") and "'X'" in lines[1].error
    assert (lines[1].prompt, lines[1].id, lines[3].error) == ('aXb', 5, '') and read[1].error == ''


KEYS = st.sampled_from(['prompt', 'id', 'x', *(f.name for f in dataclasses.fields(DEFAULTS))])
VALUES = st.recursive(st.none() | st.booleans() | st.integers(-3, 300) | st.floats()
                      | st.text(max_size=4), lambda inner: st.lists(inner, max_size=2)
                      | st.dictionaries(KEYS, inner, max_size=2))
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=4)
LINES = ((OBJECTS | OBJECTS.map(lambda given: {'prompt': 'a'} | given) | VALUES).map(json.dumps)
         | st.text(max_size=20).map(lambda text: text.replace('\n', '').replace('\r', '')))


@given(lines=st.lists(LINES.filter(str.strip), min_size=1, max_size=5))
def test_whatever_the_lines_are_each_is_a_request_or_an_error(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp('lines') / 'p.jsonl'
    path.write_text('\n'.join(['"first"', *lines]), encoding='utf-8', errors='replace',
                    newline='\n')
    read = read_requests(str(path), DEFAULTS)
    assert [line.line_number for line in read] == list(range(1, len(lines) + 2))
    for request in read:
        assert request.prompt or request.error
        assert request.params == DEFAULTS or not request.error
        assert '\n' not in request.error
        params = json.dumps(dataclasses.asdict(request.params), allow_nan=False)
        assert SamplingParams.from_dict(json.loads(params)) == request.params
        json.dumps({'id': request.id, 'prompt': request.prompt, 'error': request.error},
                   allow_nan=False).encode()
