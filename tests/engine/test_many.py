"""Files of requests: answers in the order of the lines, seeds, mistakes, interruptions (in
float64)."""
import io
import json
from dataclasses import replace

import pytest

import sample
from common.errors import UserError
from engine.engine import Engine
from engine.text.many import ROWS, complete, fitted, json_lines, make_engine
from engine.pages.cache import PAGE_SIZE
from engine.pages.page_table import page_nbytes, rows_nbytes
from engine.requests.params import SamplingParams, sample_seed
from engine.text.prompts import PromptLine, encode_lines, read_lines
from tests.helpers.serving import TOKENIZER, alone, assert_idle, budget_for, model_of

PARAMS = SamplingParams(10, temperature=1.2, seed=7)
FILE = ['"abc"', '{"prompt": "de"}', '{"prompt": "f"', '', '"ghi"', '{"prompt": "aXb"}', '"jk"',
        '"l"', '"m"', '{"prompt": "abc", "temprature": 1}', '"abc"']
LONGEST = {2: 25, 8: 90}  # max_new_tokens by line, as learned positions make them differ


def lines_of(tmp_path, *lines):
    path = tmp_path / 'lines.jsonl'
    path.write_text('\n'.join(lines))
    return encode_lines(TOKENIZER, read_lines(str(path)))


@pytest.fixture
def answers(tmp_path):
    """Return a function that answers a file with the given lines: (answers, figures)."""
    def run(lines, num_samples=1, rows=3, write=None, longest=LONGEST, params=PARAMS, **engine):
        lines = [replace(line, max_new_tokens=longest.get(line.line_number, params.max_new_tokens))
                 for line in lines_of(tmp_path, *lines)]
        engine = Engine(model_of('full stack'), rows, 60, tokenizer=TOKENIZER, page_size=4,
                        **engine)
        written = []
        try:
            figures = complete(engine, lines, num_samples, params, write or written.append)
        finally:  # however it ended
            assert_idle(engine)
        return written, figures
    return run


def without_clocks(answers):
    """Drop the clock times, and the last bits of log-probabilities."""
    return json.loads(
        json.dumps(list(answers)), parse_float=lambda x: round(float(x), 9),
        object_hook=lambda d: {k: v for k, v in d.items() if k not in ('ttft_s', 'seconds')})


def test_every_line_is_answered_in_order_whatever_is_wrong_with_others(answers):
    written, figures = answers(FILE)
    # blank lines are skipped
    assert [a['line'] for a in written] == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    failed, done = ([a for a in written if ('error' in a) == wrong] for wrong in (True, False))
    for a, expected in zip(failed, [(3, 'not JSON'), (6, "'X'"), (8, 'max_seq_len is 60'),
                                    (10, 'temprature')], strict=True):
        assert a['line'] == expected[0] and expected[1] in a['error']
        assert a['finish_reason'] == 'error' and (a['prompt'] is None) == (a['line'] in (3, 10))
        assert not {'ttft_s', 'seconds', 'seed'} & a.keys()
    for a in done:
        assert {'ttft_s', 'seconds', 'seed'} <= a.keys() and a['sample'] == 0
        assert a['finish_reason'] == 'length' and 'logprobs' not in a
        assert a['tokens'] == len(a['text']) == LONGEST.get(a['line'], 10)
    assert (figures['requests'], figures['failed']) == (10, 4) and figures['tokens_per_second'] > 0
    for key in ('tokens', 'prompt_tokens'):
        assert figures[key] == sum(a[key] for a in written)
    json.dumps(written, allow_nan=False)


def test_settings_hold_for_all_lines(answers):
    params = replace(PARAMS, logprobs=2, temperature=0, stop=('a', 'b', 'c'))
    for answer in answers(['"m"', '{"prompt": "jk"}'], params=params)[0]:
        assert len(answer['logprobs']) == answer['tokens'] and not {*'abc'} & {*answer['text']}
        for e in answer['logprobs']:
            assert len(e['top']) == 2 and e['top'][0] == {k: e[k] for k in ('token', 'logprob')}


@pytest.mark.parametrize('settings', [{}, dict(rows=1, prefill_chunk=2), dict(rows=2, pages=12)],
                         ids=str)
def test_an_answer_has_all_that_is_needed_to_draw_it_again(answers, settings):
    """The prompt and the seed in the answer reproduce each text in a run by itself."""
    if pages := settings.get('pages'):
        settings = dict(rows=2, kv_budget=budget_for(model_of('full stack'), 2, 60, pages, 4))
    written = answers(FILE, num_samples=2, **settings)[0]
    assert [a['sample'] for a in written] == [0, 1] * 10
    for a in written:
        if 'error' in a:
            continue
        params = replace(PARAMS, seed=a['seed'], max_new_tokens=LONGEST.get(a['line'], 10))
        done = alone(model_of('full stack'), a['prompt'], params, tokenizer=TOKENIZER)
        assert (a['text'], a['tokens']) == (done.text, len(done.tokens))
        assert a['finish_reason'] == done.finish_reason


def test_a_seed_depends_on_the_place_of_the_line_and_the_sample(answers):
    """A different number of later lines changes no earlier seed."""
    written, figures = answers(['"a"', '"b"'], 2, longest={})
    assert [a['seed'] for a in written] == [7, *(sample_seed(7, i) for i in (1, 2, 3))]
    plan = model_of('full stack').plan  # each needs 3 pages at its end
    rings = rows_nbytes(plan, 3, 60, 'float64')
    assert figures['kv_held_peak'] == rings + 3 * 3 * page_nbytes(plan, 4, 'float64')


def test_an_answer_is_written_as_soon_as_those_before_it_are(answers, recorded):
    """An answer that waits for an earlier, long one is written right after it, not at the end."""
    seen, steps = [], recorded(Engine, 'step', lambda engine: 1)
    answers(['"a"', '"b"', '"c"', '"d"'], rows=4, longest={2: 20, 4: 40},
            write=lambda answer: seen.append((answer['line'], len(steps))))
    assert seen == [(1, 10), (2, 20), (3, 20), (4, 40)]


@pytest.mark.parametrize('error', [KeyboardInterrupt, MemoryError])
def test_interrupted_what_is_complete_has_been_written(answers, interrupt, error):
    """Including answers that only waited for their turn: lines 1 and 5 are done, 2 is not."""
    written = []
    interrupt('engine.engine.Engine.step', {15: 'before'}.get, error)
    with pytest.raises(error):
        answers(FILE, rows=3, write=written.append)
    assert [a['line'] for a in written] == [1, 3, 5, 6, 8, 10]
    whole = {a['line']: a for a in answers(FILE, rows=3)[0]}
    assert without_clocks(written) == without_clocks(whole[a['line']] for a in written)


@pytest.mark.parametrize('encoding, shown',
                         [('utf-8', 'é☃'), ('latin-1', '\\u00e9\\u2603')])
def test_answers_are_lines_of_json_in_whatever_stdout_can_take(encoding, shown):
    raw = io.BytesIO()
    write = json_lines(io.TextIOWrapper(raw, encoding=encoding, newline=''))
    for text in ('é☃', 'two\nlines\u2028'):
        write({'text': text})
    lines = raw.getvalue().decode(encoding).split('\n')  # at once: nothing is left in a buffer
    assert shown in lines[0]
    assert [json.loads(line)['text'] for line in lines[:2]] == ['é☃', 'two\nlines\u2028']
    assert lines[2:] == ['']


# -- an engine for the lines -----------------------------------------------------------------------

def test_rows_are_as_many_as_requests_and_fewer_where_the_budget_is_small(tmp_path):
    model, huge = model_of('full stack'), 10 ** 9
    lines = fitted(model, lines_of(tmp_path, '"abc"', '"de"', '{"prompt": "f"'), 10, huge, 'auto')
    # 2 good lines, 3 samples
    assert make_engine(model, TOKENIZER, lines, 3, 0, huge, 'auto').cache.batch_size == 6
    assert make_engine(model, TOKENIZER, lines, 99, 0, huge, 'auto').cache.batch_size == ROWS
    assert make_engine(model, TOKENIZER, lines, 9, 4, huge, 'auto').cache.batch_size == 4
    page = page_nbytes(model.plan, PAGE_SIZE, 'float64')
    small = rows_nbytes(model.plan, 3, 13, 'float64') + page
    engine = make_engine(model, TOKENIZER, lines, 9, 0, small, 'auto')
    assert (engine.cache.batch_size, engine.cache.max_seq_len) == (3, 13)
    assert engine.cache.nbytes <= small
    assert make_engine(model, TOKENIZER, lines, 9, 0, small - 1, 'auto').cache.batch_size == 2


def test_learned_positions_to_the_last(tmp_path):
    """With 64 positions a prompt of 3 has room for 62 more tokens, the last of which is never
    fed."""
    model, lines = model_of('vanilla'), lines_of(tmp_path, '"abc"', f'"{"a" * 64}"',
                                                 f'"{"a" * 65}"')
    for asked, longest in ((9, [9, 1]), (62, [62, 1]), (63, [62, 1]), (500, [62, 1])):
        *fit, longer = fitted(model, lines, asked, 10 ** 9, 'auto')
        assert [line.max_new_tokens for line in fit] == longest
        assert not any(line.error for line in fit)
        assert '65 prompt tokens are more than block_size=64' in longer.error
    engine = make_engine(model, TOKENIZER, fit[:1], 1, 0, 10 ** 9, 'auto')
    [done] = engine.generate([fit[0].ids], SamplingParams(62))
    assert len(done.tokens) == 62 and engine.cache.max_seq_len == 64


# -- which lines are prompts ---------------------------------------------------------------------

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
    read = lines_in('"ab"\n{"prompt": "aXb"}\nwrong\n"b"\n')
    lines = encode_lines(TOKENIZER, read)
    assert [list(line.ids) for line in lines] == [[0, 1], [], [], [1]] and lines[2] == read[2]
    assert lines[1].error.startswith(f"{read[1].where}: ") and "'X'" in lines[1].error
    assert (lines[1].prompt, lines[3].error) == ('aXb', '') and read[1].error == ''


def test_a_line_may_need_the_whole_budget():
    model, line = model_of('full stack'), PromptLine('line 1', 1, ids=[1, 2, 3])
    needed = model.plan.nbytes(1, 3 + 9, 'float64')
    for budget, refused in ((needed, False), (needed - 1, True)):
        [fit] = fitted(model, [line], 9, budget, 'float64')
        assert bool(fit.error) == refused


def test_help_says_how_many_rows_there_are_by_default():
    meaning = sample.Settings.__dataclass_fields__['parallel'].metadata['meaning']
    assert f'up to {ROWS}' in meaning
