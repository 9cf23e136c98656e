"""vLLM beside our engine: both get the same prompts, and times and texts land where they belong.
vLLM itself is a stand-in here: tests/vllm/ has the real one."""
import json
import sys
from types import SimpleNamespace

import pytest

import bench
from config.errors import UserError
from lab.benchmarks import clock, table, vllm

FLAGS = dict(n_layer=6, n_head=2, n_embd=64, block_size=256, pos_embedding='rope', dataset='none',
             n_kv_head=1, against='vllm', device='cpu', seed=3)


@pytest.fixture
def run(monkeypatch, capsys):
    """bench.py's document, what vLLM was asked, and what our engine was."""
    pytest.importorskip('transformers')  # which writes what vLLM reads
    asked, ours = [], []

    class LLM:
        def __init__(self, model, dtype, max_model_len, max_num_seqs, **_):
            assert dtype == 'bfloat16'
            with open(f'{model}/config.json') as file:
                self.vocab_size = json.load(file)['vocab_size']

        def generate(self, prompts, params, use_tqdm):
            asked.append([prompt['prompt_token_ids'] for prompt in prompts])
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[self.vocab_size] * p.max_tokens)])
                    for p in params]

    monkeypatch.setitem(sys.modules, 'vllm', SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace, __version__='0'))
    plain = vllm.Ours.__call__
    monkeypatch.setattr(vllm.Ours, '__call__', lambda self, prompts, lengths: (
        ours.append(prompts), plain(self, prompts, lengths))[1])

    def call(**settings):
        bench.main([f'--{name}={value}' for name, value in (FLAGS | settings | {'json': True}).items()])
        return json.loads(capsys.readouterr().out.splitlines()[-1]), asked, ours
    return call


def test_requests(run):
    document, asked, ours = run(mode='serve', contexts='12', batch_sizes=2, requests=3, output_lengths=4)
    assert asked == ours and len(asked) == 6 and all(map(len, asked))
    assert len({str(prompt) for prompts in asked for prompt in prompts}) == 18  # none comes twice
    cell, = document['cells']
    assert (cell['context'], cell['rows'], cell['rows_equal'], cell['requests']) == (12, 2, 0, 3)
    for side in cell['sides'].values():
        assert side['tokens_per_second']['each'] == pytest.approx([12 / x for x in side['seconds']['each']])
    pairs = zip(cell['sides']['vllm']['seconds']['each'], cell['sides']['ours']['seconds']['each'])
    assert cell['ratios']['tokens_per_second']['vllm']['each'] == pytest.approx([a / b for a, b in pairs])
    assert 'vLLM in bfloat16' in table.section('x', document) and document['vllm'] == '0'


def test_prompts_come_again_and_edited(run, monkeypatch):
    found = []
    plain = clock.alternate
    monkeypatch.setattr(clock, 'alternate', lambda *args: found.append(plain(*args)) or found[-1])
    document, asked, ours = run(mode='prefill', contexts='100,200', message=5)
    assert asked == ours and len(asked) == 2 * 6 * 3
    assert [(cell['context'], cell['prompt']) for cell in document['cells']] == [
        (n, prompt) for n in (100, 200) for prompt in ('cold', 'again', 'edited')]
    for (cold,), (again,), (edited,) in zip(asked[::3], asked[1::3], asked[2::3]):
        n = len(cold)
        assert again[:n] == cold and len(again) == len(edited) == n + 5
        kept = n - n // 50
        assert edited[:kept] == cold[:kept] and edited[kept:] != again[kept:]
    first = found[0]['cold', 'ours']
    assert document['cells'][0]['sides']['ours']['seconds']['each'] == [seconds for seconds, _ in first]
    assert 'edited' in table.section('x', document)


def test_our_engine_finds_what_it_computed(run, monkeypatch):
    engines = []
    plain = vllm.Engine
    monkeypatch.setattr(vllm, 'Engine', lambda *args, **how: engines.append(plain(*args, **how)) or engines[-1])
    cached = []
    finish = plain.generate
    monkeypatch.setattr(plain, 'generate', lambda *args: [
        cached.append(done.n_cached) or done for done in finish(*args)])
    run(mode='prefill', contexts='200', message=5)
    assert len(engines) == 1 and cached[::3] == [0] * 6
    assert all(n >= 128 for n in cached[1::3] + cached[2::3])


@pytest.mark.parametrize('settings, named', [
    (dict(mode='prefill', batch_sizes='1,2'), "batch_sizes='1,2'"),
    (dict(mode='serve', device='meta'), 'device'),
    (dict(mode='prefill', pos_embedding='learned', contexts=250), 'contexts: 250 and 21 steps')])
def test_settings_that_cannot_be(settings, named):
    with pytest.raises(UserError, match=named):
        bench.main([f'--{name}={value}' for name, value in (FLAGS | settings).items()])


def test_without_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, 'vllm', None)
    with pytest.raises(UserError, match=r"against='vllm' needs vLLM: lab/scripts/vllm_env.sh"):
        bench.main([f'--{name}={value}' for name, value in (FLAGS | dict(mode='serve')).items()])
