"""sample.py --prompts: many prompts, each its own samples, whatever shares a batch; and what is no file of prompts."""
import json

import pytest
import torch

import sample
from config.errors import UserError
from data.tokenizer import CharTokenizer
from inference.prompts import encode_prompts, read_prompts
from tests.programs.support import ALPHABET, flags, load
from tests.programs.test_sample import KINDS, samples_in, texts

LINES = ['ab', 'abcdefghij', 'c', 'jihgfedcbaabcdefghijab', 'ef gh']


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
    monkeypatch.setattr(sample, 'pick_dtype', lambda *_: torch.float64)


def run_many(capsys, folder, path, **settings):
    """sample.py's standard output for a file of prompts."""
    capsys.readouterr()
    sample.main(flags(dict(out_dir=folder, device='cpu', prompts=path, max_new_tokens=20, num_samples=1) | settings))
    return capsys.readouterr().out


def many(*args, **settings):
    return samples_in(run_many(*args, report=False, **settings))


# -- the samples ------------------------------------------------------------------------------------------------------

@KINDS
@pytest.mark.parametrize('settings', [dict(), dict(temperature=0), dict(num_samples=3, top_k=4), dict(stop='cd')], ids=str)
def test_what_shares_a_batch_changes_no_text(capsys, trained, prompts_file, fp64, kind, settings):
    path = prompts_file('\n'.join(LINES))
    one = many(capsys, trained[kind], path, **settings)
    for parallel in (2, 8):
        assert many(capsys, trained[kind], path, parallel=parallel, **settings) == one
    n = settings.get('num_samples', 1)
    assert len(one) == 5 * n and all(text.startswith(LINES[k // n]) for k, text in enumerate(one))


def test_one_sample_of_each_prompt_unless_told_otherwise(capsys, trained, prompts_file):
    sample.main(flags(dict(out_dir=trained['full'], device='cpu', prompts=prompts_file('ab\ncd\n'), max_new_tokens=2)))
    assert capsys.readouterr().out.count('---------------') == 2


@KINDS
def test_sample_k_of_prompt_p_draws_from_generator_p_times_num_samples_plus_k(capsys, trained, prompts_file, fp64, kind):
    """So equal prompts get different samples, the first prompt those it gets as `start`, and these are all there are."""
    same = many(capsys, trained[kind], prompts_file('ab\n' * 3), num_samples=2)
    assert same == texts(capsys, trained[kind], start='ab', num_samples=6, max_new_tokens=20) and len(set(same)) == 6


@KINDS
def test_each_prompt_gets_what_full_forwards_give_it_alone(capsys, trained, prompts_file, fp64, kind):
    checkpoint = load(trained[kind] / 'ckpt.pt')
    model = sample.GPT(sample.GPTConfig(**checkpoint['model_args']))
    model.load_state_dict(checkpoint['model'])
    model.double().eval()
    expected = []
    for line in LINES:
        idx = torch.tensor([[ALPHABET.index(c) for c in line]])
        with torch.no_grad():
            for _ in range(20):
                seen = idx if kind == 'full' else idx[:, -16:]
                idx = torch.cat([idx, model(seen)[0][:, -1].argmax(-1, keepdim=True)], dim=1)
        expected.append(''.join(ALPHABET[i] for i in idx[0]))
    assert many(capsys, trained[kind], prompts_file('\n'.join(LINES)), parallel=8, temperature=0) == expected


def test_prompts_of_a_jsonl_file_may_have_several_lines(capsys, trained, prompts_file):
    path = prompts_file('"a\\nb"\n\n "cd" \n', 'prompts.jsonl')
    assert [text[:-1] for text in many(capsys, trained['full'], path, max_new_tokens=1)] == ['a\nb', 'cd']
    assert read_prompts('', str(path)) == [(f"prompts='{path}', line 1", 'a\nb'), (f"prompts='{path}', line 3", 'cd')]


def test_the_report_is_of_a_cache_for_the_longest_prompt(capsys, trained, prompts_file):
    path = prompts_file('\n'.join(LINES))
    f = json.loads(run_many(capsys, trained['full'], path, parallel=3, max_new_tokens=7, json=True).splitlines()[-1])
    assert (f['batch'], f['max_seq_len'], f['prompts'], f['prompt_tokens'], f['tokens']) == (3, 22 + 7, 5, 22, 35)
    assert f['slots'][2]['shape'] == [3, 1, 29, 8] and f['kv_bytes'] == sum(slot['bytes'] for slot in f['slots'])
    assert '(up to 22 prompt tokens)' in run_many(capsys, trained['full'], path)
    assert 'as allocated for 3 x 16 tokens' in run_many(capsys, trained['vanilla'], path, parallel=3)  # block_size


def test_one_longest_prompt_past_block_size_is_said_and_done(capsys, trained, prompts_file):
    out = run_many(capsys, trained['vanilla'], prompts_file('\n'.join(LINES)), max_new_tokens=1, parallel=9)
    assert 'block_size=16' in out and out.count('\n---------------\n') == 5


def test_a_file_with_one_prompt_is_that_prompt(capsys, trained, prompts_file):
    assert many(capsys, trained['full'], prompts_file('abc\n')) == texts(
        capsys, trained['full'], start='abc', max_new_tokens=20)


@pytest.mark.parametrize('content, expected', [
    ('a\n\n  \nb c \n', ['a', 'b c ']), ('a\r\nb\r\n', ['a', 'b']), ('\ufeffa\nb', ['a', 'b']),
    ('a\u2028b\x0bc\nd', ['a\u2028b\x0bc', 'd']), ('"a"', ['"a"'])], ids=ascii)
def test_lines_of_a_text_file(prompts_file, content, expected):
    assert [text for _, text in read_prompts('', str(prompts_file(content)))] == expected


# -- wrong input ------------------------------------------------------------------------------------------------------

@pytest.fixture
def refused(capsys, trained, tmp_path):
    def check(*named, **settings):
        before = {p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()}
        with pytest.raises(UserError) as caught:
            sample.main(flags(dict(out_dir=trained['full'], device='cpu', max_new_tokens=3) | settings))
        message = str(caught.value)
        assert '\n' not in message and len(message) < 1000
        for text in named:
            assert str(text) in message, message
        assert {p: p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()} == before
        assert '-----' not in capsys.readouterr().out
    return check


@pytest.mark.parametrize('content, name, named', [
    ('', 'p.txt', ['no prompts', 'one a line']),
    (' \n\n', 'p.txt', ['no prompts']),
    ('\n', 'p.jsonl', ['no prompts']),
    (b'a\ncaf\xe9\n', 'p.txt', ['UTF-8']),
    ('ab\n\naXb\n', 'p.txt', ['line 3', "'X'", ALPHABET.strip()]),
    ('"ab"\nab\n', 'p.jsonl', ['line 2', "'ab'", 'JSON string']),
    ('"ab"\n\n["ab"]\n', 'p.JSONL', ['line 3', '["ab"]', 'JSON string']),
    ('5\n', 'p.jsonl', ['line 1', "'5'", 'JSON string']),
    ('"ab"\n""\n', 'p.jsonl', ['line 2', 'no tokens']),
    ('"a\\ud800"\n', 'p.jsonl', ['line 1', 'ud800']),
    ('[' * 100_000, 'p.jsonl', ['line 1', 'JSON string']),
    ('"ab', 'p.jsonl', ['line 1', 'JSON string']),
], ids=lambda x: ascii(x)[:30])
def test_a_file_that_is_not_one_of_prompts(refused, prompts_file, content, name, named):
    path = prompts_file(content, name)
    refused(path, *named, prompts=path)


@pytest.mark.parametrize('path', ['no/such.txt', '.', 'a\0b'])
def test_a_file_that_cannot_be_read(refused, path):
    refused(repr(path), 'cannot be read', prompts=path)


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
        encode_prompts(tokenizer, read_prompts('a' * 5000 + 'b', ''))
    assert "'b'" in str(caught.value) and len(str(caught.value)) < 500


def test_json_is_the_last_line_also_with_prompts(capsys, trained, prompts_file):
    out = run_many(capsys, trained['full'], prompts_file('a\nb'), json=True, report=False)
    assert json.loads(out.splitlines()[-1])['prompts'] == 2
