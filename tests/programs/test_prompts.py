"""sample.py --prompts: stdout has one line of JSON per request in the file, and nothing else."""
import json

import pytest
import torch

import sample
from tests.helpers.serving import ending
from tests.programs.support import flags
from tests.programs.test_sample import KINDS, RULE
from tests.programs.test_sample import texts as sampled

LINES = ['ab', 'abcdefghij', 'c', 'jihgfedcbaabcdefghijab', 'ef gh']
# prompts that fit a model with 16 learned positions
SHORT = [line for line in LINES if len(line) < 16]


@pytest.fixture
def prompts_file(tmp_path):
    def write(content, name='prompts.txt'):
        (tmp_path / name).write_text(content)
        return tmp_path / name
    return write


@pytest.fixture
def fp64(monkeypatch):
    """Use float64: rounding depends on the batch size, but this never shows there."""
    monkeypatch.setattr('interop.load.pick_dtype', lambda *_: torch.float64)


@pytest.fixture
def many(capsys):
    """Return a function that answers a file of prompts: each line of stdout is an answer."""
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


@KINDS
def test_each_prompt_gets_the_text_of_the_program_without_prompts(many, trained, prompts_file, fp64,
                                                                  capsys, kind):
    lines = LINES if kind == 'full' else SHORT
    path = prompts_file('\n'.join(lines))
    expected = [text[len(line):] for line in lines for text in sampled(
        capsys, trained[kind], start=line, temperature=0, max_new_tokens=6)]
    for settings in (dict(parallel=1), dict(parallel=2, kv_budget='40kB')):
        assert texts(many(trained[kind], path, temperature=0, **settings)) == expected


def test_what_prompts_begin_with_is_computed_once(many, trained, prompts_file, fp64):
    begin = 'abcdefghij' * 13
    path = prompts_file(f'{begin}a\n{begin}a\n{begin}bcd\n')
    plain, found = (many(trained['full'], path, num_samples=2, **more)
                    for more in ({}, dict(prefix_budget='1MB')))
    assert texts(plain) == texts(found) and not any('cached_tokens' in answer for answer in plain)
    assert [answer.get('cached_tokens', 0) for answer in found] == [0] + [128] * 5


def test_texts_end_with_the_token_for_it(many, prompts_file, monkeypatch):
    monkeypatch.setattr(sample, 'load', lambda *_, **__: (*ending(), ''))
    [ends] = many('none', prompts_file('a'), temperature=0)
    assert (ends['text'], ends['finish_reason'], ends['tokens']) == ('', 'stop', 1)
    [goes_on] = many('none', prompts_file('a'), temperature=0, ignore_eos=True)
    assert (goes_on['text'], goes_on['finish_reason']) == ('<|endoftext|>' * 6, 'length')


@pytest.mark.parametrize('kind, reason', [('full', '100 kB'), ('vanilla', 'block_size=16')])
def test_one_that_is_too_long_stops_no_other(many, trained, prompts_file, monkeypatch, kind,
                                             reason):
    """Where learned positions end, the text does."""
    monkeypatch.setattr(sample, 'total_memory', lambda device: 200_000)
    lines = ['ab', 'ab' * 6, 'ab' * 1000, 'cd']
    good, longer, bad, last = many(trained[kind], prompts_file('\n'.join(lines)))
    assert good['tokens'] == last['tokens'] == 6
    learned = kind == 'vanilla'
    assert (longer['tokens'], longer['finish_reason']) == (5 if learned else 6, 'length')
    assert ('block_size=16; texts end there' in many.err) == learned
    assert bad['finish_reason'] == 'error' and '2000 prompt tokens' in bad['error']
    assert reason in bad['error'] and bad['error'].startswith('prompts=')


def test_stdout_has_answers_and_figures_and_stderr_all_else(many, trained, prompts_file):
    *answers, f = many(trained['full'], prompts_file('\n'.join(LINES)), parallel=3,
                       max_new_tokens=7, seed=9, json=True, report=True)
    assert len(answers) == 5 and answers[0]['seed'] == 9
    assert (f['batch'], f['max_seq_len'], f['requests'], f['failed']) == (3, 22 + 7, 5, 0)
    assert (f['prompt_tokens'], f['tokens']) == (40, 35)
    # K and V of width 8 in float32; three rings of 4 per row, and a page of 64 in the global slot
    per_position = 2 * 8 * 4
    assert f['kv_bytes'] == f['kv_held_peak'] == 3 * (3 * 4 + 64) * per_position
    assert f['kv_bytes_vanilla'] == 2 * f['kv_bytes_vanilla_bf16'] == 3 * 29 * 7 * 2 * per_position
    assert 'Overriding: max_new_tokens = 7' in many.err and '5 requests (0 failed)' in many.err
