"""llama.cpp: the same weights give the same logits and tokens as in ours. What is refused against
any other program."""
import json
import sys

import pytest

import bench
from config.errors import UserError
from config.gpt_config import GPTConfig
from kv.plan import plan_kv
from lab.benchmarks import generation, llama, table
from lab.benchmarks.engines import HuggingFace
from tests.programs.support import flags

NO_LLAMA = 'llama-cpp-python is compiled from source, and so in no list of requirements'
SIDES = ['llama.cpp f32', 'llama.cpp f16', 'llama.cpp q8_0']
FLAGS = dict(mode='decode', against='llama.cpp', n_layer=6, n_head=2, n_embd=64, block_size=48,
             device='cpu', contexts=12, batch_sizes=2, steps=3, dataset='none')
VLLM = dict(mode='serve', against='vllm', output_lengths=4)


@pytest.mark.parametrize('weight_dtype', ['auto', 'int8'])
def test_it_makes_our_tokens(capsys, tmp_path, monkeypatch, weight_dtype):
    for name in ('llama_cpp', 'gguf'):
        pytest.importorskip(name, reason=NO_LLAMA)
    monkeypatch.setattr(llama, 'PIECE', 8)  # so prompts are split, or share a piece
    file = tmp_path / 'peers.json'
    bench.main(flags(FLAGS | dict(weight_dtype=weight_dtype, kv_dtype=weight_dtype,
                                  contexts='3,12', save=file)))
    printed, found = capsys.readouterr().out, json.loads(file.read_text())
    assert found['max_logit_difference'] <= found['tolerance']
    assert found['models']['ours']['gelu'] == 'tanh' and found['models']['ours']['bias'] is True
    for one in found['cells']:
        assert list(one['sides']) == ['ours', *SIDES]
        assert (one['sides'][SIDES[0]]['rows_equal'] == 2) or weight_dtype == 'int8'
        # 256 positions of float16 in each of 6 layers, for two rows
        assert one['sides']['llama.cpp f32']['kv_bytes'] == 2 * 256 * 6 * 2 * 64 * 2
    page = table.page({'peers': table.read(str(file))})
    assert all(name in text for text in (printed, page) for name in SIDES)


def test_ours_runs_as_the_settings_have_it(capsys, monkeypatch):
    """With transformers in place of llama.cpp: logits are compared before weights are rounded."""
    pytest.importorskip('transformers')
    monkeypatch.setitem(generation.PEERS, 'llama.cpp', HuggingFace)
    bench.main(flags(FLAGS | dict(weight_dtype='int8', kv_dtype='int8', json=True)))
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found['max_logit_difference'] < 1e-4
    assert (found['dtype'], found['kv_dtype']) == ('int8', 'int8')
    ours = GPTConfig(n_layer=6, n_head=2, n_embd=64)
    assert found['cells'][0]['sides']['ours']['kv_bytes'] == plan_kv(ours).nbytes(2, 15, 'int8')


@pytest.mark.parametrize('change, named', [
    (dict(n_kv_head=1), 'n_kv_head=1'), (dict(compile=True), 'compile=True'),
    (dict(steps=1), 'steps=1'), (dict(budget='1GB'), 'budget='),
    ({}, 'needs the package gguf: .*pip install'),
    (dict(against='hf', pos_embedding='rope'), "pos_embedding='rope'"),
    (dict(against='nanogpt', gelu='tanh'), "gelu='tanh'"),
    (dict(VLLM, device='meta'), 'device='),
    (VLLM, 'needs vLLM: lab/scripts/vllm_env.sh')], ids=str)
def test_what_is_refused(change, named, monkeypatch):
    for name in ('llama_cpp', 'gguf', 'vllm'):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=named):
        bench.main(flags(FLAGS | change))
