"""sample.py --prompts: a file of requests in, a line of JSON for each out, whatever shares a batch;
nothing else on stdout."""
import json
import signal

import pytest
import torch

import sample
from config.errors import UserError
from config.gpt_config import GPTConfig
from data.tokenizer import CharTokenizer
from engine.prompts import encode_prompt, read_start
from model import GPT
from tests.programs.support import ALPHABET, flags, load, start_program
from tests.programs.test_sample import KINDS, RULE

LINES = ['ab', 'abcdefghij', 'c', 'jihgfedcbaabcdefghijab', 'ef gh']
# what a model with 16 learned positions can go on from
SHORT = [line for line in LINES if len(line) < 16]


@pytest.fixture
def prompts_file(tmp_path):
    def write(content, name='prompts.txt'):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path
    return write


@pytest.fixture
def fp64(monkeypatch):
    """Rounding depends on the batch size: in float64 that never shows."""
    monkeypatch.setattr('interop.load.pick_dtype', lambda *_: torch.float64)


@pytest.fixture
def many(capsys):
    """The answers for a file of prompts. Every line of stdout must be one, and of the settings'
    echo there is none."""
    def run(folder, path, **settings):
        capsys.readouterr()
        status = 0
        try:
            sample.main(flags(dict(out_dir=folder, device='cpu', prompts=path, max_new_tokens=6,
                                   report=False) | settings))
        except SystemExit as e:
            status = e.code
        out, run.err = capsys.readouterr()
        assert out.endswith('\n') and RULE not in out
        lines = [json.loads(line) for line in out.removesuffix('\n').split('\n')]
        assert status == any('error' in line for line in lines)
        return lines
    return run


def texts(answers):
    return [answer['text'] for answer in answers]


# -- the answers -----------------------------------------------------------------------------------

@KINDS
@pytest.mark.parametrize('settings',
                         [dict(), dict(temperature=0), dict(num_samples=3, top_k=4),
                          dict(stop='cd'), dict(min_p=0.1, repetition_penalty=1.5, logprobs=1),
                          dict(kv_dtype='int8')], ids=str)
def test_what_shares_a_batch_changes_no_text(many, trained, prompts_file, fp64, kind, settings):
    path = prompts_file('\n'.join(LINES))
    one = many(trained[kind], path, parallel=1, **settings)
    for more in (dict(), dict(parallel=2), dict(parallel=2, kv_budget='40kB')):
        assert texts(many(trained[kind], path, **more, **settings)) == texts(one)
    n = settings.get('num_samples', 1)
    assert [(a['line'], a['sample']) for a in one] == [(line, k) for line in range(1, 6)
                                                       for k in range(n)]
    assert [a['finish_reason'] == 'error' for a in one] == [kind == 'vanilla' and a['line'] == 4
                                                            for a in one]
    assert [a['prompt'] for a in one] == [line for line in LINES for _ in range(n)]


@KINDS
def test_each_prompt_gets_what_full_forwards_give_it_alone(many, trained, prompts_file, fp64, kind):
    checkpoint = load(trained[kind] / 'ckpt.pt')
    model = GPT(GPTConfig(**checkpoint['model_args']))
    model.load_state_dict(checkpoint['model'])
    model.double().eval()
    lines, expected = LINES if kind == 'full' else SHORT, []
    for line in lines:
        idx = torch.tensor([[ALPHABET.index(c) for c in line]])
        with torch.no_grad():
            for _ in range(6):
                idx = torch.cat([idx, model(idx)[0][:, -1].argmax(-1, keepdim=True)], dim=1)
        expected.append(''.join(ALPHABET[i] for i in idx[0])[len(line):])
    assert texts(many(trained[kind], prompts_file('\n'.join(lines)), temperature=0)) == expected


def test_what_prompts_begin_with_is_computed_once(many, trained, prompts_file, fp64):
    begin = 'abcdefghij' * 13
    path = prompts_file(f'{begin}a\n{begin}a\n{begin}bcd\n')
    plain, found = (many(trained['full'], path, num_samples=2, **more)
                    for more in ({}, dict(prefix_budget='1MB')))
    assert texts(plain) == texts(found) and not any('cached_tokens' in answer for answer in plain)
    assert [answer.get('cached_tokens', 0) for answer in found] == [0] + [128] * 5


def test_one_sample_of_each_prompt_unless_told_otherwise(many, trained, prompts_file):
    path = prompts_file('ab\ncd\n')
    assert len(many(trained['full'], path)) == 2
    assert len(many(trained['full'], path, num_samples=5)) == 10


def test_equal_prompts_get_different_samples_and_seeds_say_which(many, trained, prompts_file):
    settings = dict(num_samples=2, max_new_tokens=20)
    same = many(trained['full'], prompts_file('ab\n' * 3), **settings)
    assert len(set(texts(same))) == 6
    assert texts(many(trained['full'], prompts_file('ab\n' * 3), **settings)) == texts(same)
    assert not set(texts(many(trained['full'], prompts_file('ab\n' * 3), seed=1,
                              **settings))) & set(texts(same))
    again = ''.join(json.dumps({'prompt': 'ab', 'seed': a['seed']}) + '\n' for a in same[::-1])
    assert texts(many(trained['full'], prompts_file(again, 'p.jsonl'),
                      max_new_tokens=20)) == texts(same)[::-1]


def test_lines_with_settings_of_their_own(many, trained, prompts_file):
    """What the command line says holds where a line says nothing; wrong lines are answered where
    they stand."""
    path = prompts_file('"a\\nb"\n\n{"prompt": "cd", "id": "x", "max_new_tokens": 3, "logprobs": 0}'
                        '\n{"prompt": "aXb"}\n[5\n'
                        '{"prompt": "ab", "temperature": -1, "id": 7}\n"ab"', 'p.jsonl')
    a, cd, unknown, broken, negative, last = many(trained['full'], path, max_new_tokens=5)
    assert (a['line'], a['prompt'], a['tokens'], a['finish_reason']) == (1, 'a\nb', 5, 'length')
    assert 'id' not in a
    assert (cd['line'], cd['id'], cd['tokens'], len(cd['logprobs'])) == (3, 'x', 3, 3)
    assert 'logprobs' not in a
    assert [x['line'] for x in (unknown, broken, negative, last)] == [4, 5, 6, 7]
    assert last['tokens'] == 5
    for answer, named in ((unknown, "'X'"), (broken, 'not JSON'), (negative, 'temperature=-1')):
        assert answer['finish_reason'] == 'error' and named in answer['error']
        assert f"line {answer['line']}" in answer['error']
    assert negative['id'] == 7


@KINDS
def test_one_that_is_too_long_stops_no_other(many, trained, prompts_file, monkeypatch, kind):
    """A line could ask for more positions than there is memory for all, or than a number can
    say."""
    monkeypatch.setattr(sample, 'total_memory', lambda device: 200_000)
    lines = ['"ab"'] + [f'{{"prompt": "ab", "max_new_tokens": {n}}}'
                        for n in (40_000, 10 ** 11, 10 ** 25)] + ['"cd"']
    good, *bad, last = many(trained[kind], prompts_file('\n'.join(lines), 'p.jsonl'))
    assert good['tokens'] == last['tokens'] == 6
    reasons = ['100 kB' if kind == 'full'
               else 'more than block_size=16'] + ['at most 2,147,483,647'] * 2
    for answer, named, reason in zip(bad, ('40000', '1' + '0' * 11, '1' + '0' * 25), reasons):
        assert answer['finish_reason'] == 'error' and f'max_new_tokens={named}' in answer['error']
        assert reason in answer['error'] and answer['error'].startswith('prompts=')


def test_learned_positions_shorten_texts_unless_they_were_asked_for(trained, prompts_file, capsys):
    """sample.py's 500 tokens are more than a nanoGPT checkpoint of block_size 256 has positions
    for: no reason to refuse."""
    path = prompts_file('"abcd"\n{"prompt": "ab", "max_new_tokens": 30}\n"abcdefghijabcdefghij"',
                        'p.jsonl')
    with pytest.raises(SystemExit, match='1'):
        sample.main(flags(dict(out_dir=trained['vanilla'], device='cpu', prompts=path,
                               report=False)))
    out, err = capsys.readouterr()
    first, asked, long = map(json.loads, out.splitlines())
    # positions 0 to 15, and one token after them
    assert (first['tokens'], first['finish_reason']) == (13, 'length')
    assert 'max_new_tokens=30' in asked['error'] and '20 prompt tokens' in long['error']
    assert 'block_size=16; texts end there' in err


# -- what goes where -------------------------------------------------------------------------------

def test_stdout_has_answers_and_figures_and_stderr_all_else(many, trained, prompts_file):
    *answers, f = many(trained['full'], prompts_file('\n'.join(LINES)), parallel=3,
                       max_new_tokens=7, json=True, report=True)
    assert len(answers) == 5
    assert (f['batch'], f['max_seq_len'], f['requests'], f['failed']) == (3, 22 + 7, 5, 0)
    assert (f['prompt_tokens'], f['tokens'], f['kv_dtype'], f['weights']) == (40, 35, 'float32',
                                                                              'float32')
    # K and V, 8 wide, float32; three rings of 4 a row, and a page of 64 of the global slot
    per_position = 2 * 8 * 4
    assert f['kv_bytes'] == f['kv_held_peak'] == 3 * (3 * 4 + 64) * per_position
    assert f['kv_bytes_vanilla'] == 2 * f['kv_bytes_vanilla_bf16'] == 3 * 29 * 7 * 2 * per_position
    for said in ('Overriding: max_new_tokens = 7', 'meta.pkl', '5 requests (0 failed)',
                 '35 generated', '3 rows'):
        assert said in many.err, many.err


def test_json_is_the_last_line_also_without_report(many, trained, prompts_file):
    assert many(trained['full'], prompts_file('a\nb'), json=True)[-1]['requests'] == 2
    assert 'requests' not in many.err
    assert many(trained['full'], prompts_file('5', 'p.jsonl'), json=True)[-1]['failed'] == 1


def test_ctrl_c_of_the_program_itself(trained, prompts_file, data_root):
    path = prompts_file('"ab"\n' + '{"prompt": "ab", "max_new_tokens": 1000000}\n' * 2, 'p.jsonl')
    process = start_program('sample',
                            *flags(dict(out_dir=trained['full'], device='cpu', prompts=path,
                                        max_new_tokens=3)), data_root=data_root)
    assert json.loads(process.stdout.readline())['tokens'] == 3
    process.send_signal(signal.SIGINT)
    try:
        rest, err = process.communicate(timeout=120)
    finally:
        process.kill()  # nothing may go on for a million tokens
    assert (process.returncode, rest) == (130, '') and err.endswith('interrupted\n')
    assert 'Traceback' not in err


def test_a_reader_that_goes_away_ends_it_quietly(trained, prompts_file, data_root):
    """As in `sample.py --prompts=FILE | head -1`."""
    path = prompts_file('"ab"\n' * 5 + '{"prompt": "ab", "max_new_tokens": 2000}\n' + '"ab"\n' * 50,
                        'p.jsonl')
    process = start_program('sample',
                            *flags(dict(out_dir=trained['full'], device='cpu', prompts=path,
                                        max_new_tokens=3, parallel=2)), data_root=data_root)
    assert json.loads(process.stdout.readline())['line'] == 1
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=120) in (1, 120) and 'Traceback' not in err and 'Broken' not in err


# -- wrong input -----------------------------------------------------------------------------------

@pytest.fixture
def refused(capsys, trained, tmp_path):
    def check(*named, **settings):
        before = {p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()}
        with pytest.raises(UserError) as caught:
            sample.main(flags(dict(out_dir=trained['full'], device='cpu', max_new_tokens=3)
                              | settings))
        message = str(caught.value)
        assert '\n' not in message and len(message) < 1000
        for text in named:
            assert str(text) in message, message
        assert {p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()} == before
        assert '{' not in capsys.readouterr().out
    return check


@pytest.mark.parametrize('settings, named',
                         [(dict(min_p=1.0), 'min_p=1.0'), (dict(min_p=-0.1), 'min_p=-0.1'),
                          (dict(repetition_penalty=0), 'repetition_penalty=0'),
                          (dict(logprobs=-2), 'logprobs=-2'),
                          (dict(kv_budget='1kB'), 'kv_budget=1,000 '),
                          (dict(kv_budget='much'), "'much'"), (dict(parallel=0), 'parallel=0'),
                          (dict(num_samples=0), 'num_samples=0'), (dict(top_p=0), 'top_p=0'),
                          (dict(stop="['']"), 'at least one character')], ids=str)
def test_settings_that_are_wrong_for_all(refused, prompts_file, settings, named):
    refused(named, prompts=prompts_file('a'), **settings)


@pytest.mark.parametrize('settings',
                         [dict(min_p=0.1), dict(repetition_penalty=1.2), dict(logprobs=1),
                          dict(kv_budget='1GB')], ids=str)
def test_settings_that_only_many_prompts_have(refused, settings):
    """Not quietly passed over, where nanoGPT's way of drawing does without them."""
    [(name, value)] = settings.items()
    refused(f'{name}={value!r}', '--prompts', start='ab', **settings)


def test_start_and_prompts_together(trained, prompts_file):
    """Given in whatever place: neither is quietly passed over."""
    path = prompts_file('a')
    config = prompts_file('start = "b"\n', 'c.py')
    for args in (['--start=b', f'--prompts={path}'], [str(config), f'--prompts={path}']):
        with pytest.raises(UserError, match="start='b'.*prompts=.*both"):
            sample.main([f'--out_dir={trained["full"]}', *args])


def test_a_long_start_is_not_all_repeated_in_the_message():
    tokenizer = CharTokenizer({'a': 0}, {0: 'a'})
    with pytest.raises(UserError) as caught:
        encode_prompt(tokenizer, *read_start('a' * 5000 + 'b'))
    assert "'b'" in str(caught.value) and len(str(caught.value)) < 500
