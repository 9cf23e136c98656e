"""vLLM next to our engine: both get the same prompts, and times and texts are reported correctly.
vLLM is replaced by a fake here; tests/vllm/ has the real one."""
import json
import sys
from types import SimpleNamespace

import pytest

import bench
from engine.engine import Engine
from lab.benchmarks import table
from tests.programs.support import flags

FLAGS = dict(n_layer=6, n_head=2, n_embd=64, block_size=256, pos_embedding='rope', dataset='none',
             n_kv_head=1, against='vllm', device='cpu', seed=3)


@pytest.fixture
def run(monkeypatch, capsys):
    """bench.py's document, the prompts that vLLM got, and those that our engine got."""
    pytest.importorskip('transformers')  # writes the model that vLLM reads
    asked, ours = [], []

    class LLM:
        def __init__(self, model, dtype, max_model_len, max_num_seqs, **_):
            assert dtype == 'bfloat16'
            with open(f'{model}/config.json') as file:
                self.vocab_size = json.load(file)['vocab_size']

        def generate(self, prompts, params, use_tqdm):
            asked.append([prompt['prompt_token_ids'] for prompt in prompts])
            texts = [[self.vocab_size] * p.max_tokens for p in params]
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=text)]) for text in texts]

    module = SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace, __version__='0')
    monkeypatch.setitem(sys.modules, 'vllm', module)
    plain = Engine.generate
    monkeypatch.setattr(Engine, 'generate', lambda engine, prompts, params: (
        ours.append(prompts), plain(engine, prompts, params))[1])

    def call(**settings):
        bench.main(flags(FLAGS | settings | dict(json=True)))
        return json.loads(capsys.readouterr().out.splitlines()[-1]), asked, ours
    return call


def test_requests(run):
    document, asked, ours = run(mode='serve', contexts='12', batch_sizes=2, requests=3,
                                output_lengths=4)
    assert asked == ours and len(asked) == 6 and all(map(len, asked))
    cell, = document['cells']
    assert (cell['context'], cell['rows'], document['requests']) == (12, 2, 3)
    seconds = {name: side['seconds']['each'] for name, side in cell['sides'].items()}
    for name, side in cell['sides'].items():
        assert side['tokens_per_second']['each'] == pytest.approx([12 / x for x in seconds[name]])
    assert cell['ratios']['tokens_per_second']['vllm']['each'] == pytest.approx(
        [a / b for a, b in zip(seconds['vllm'], seconds['ours'])])
    assert 'vLLM in bfloat16' in table.section('x', document) and document['vllm'] == '0'
