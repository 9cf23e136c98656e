"""llama.cpp: the same weights give the same logits and tokens as in ours."""
import contextlib
import json
import sys

import pytest
import torch

import bench
from config.errors import UserError
from config.gpt_config import GPTConfig
from engine.weights.quantized import Int8Linear
from kv.plan import plan_kv
from lab.benchmarks import generation, llama, table
from lab.benchmarks.engines import Ours
from lab.benchmarks.generation import same_tokens, with_biases

NO_LLAMA = 'llama-cpp-python is compiled from source, and so in no list of requirements'
SIDES = ['llama.cpp f32', 'llama.cpp f16', 'llama.cpp q8_0']
TINY = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=48, vocab_size=96, gelu='tanh')
FLAGS = dict(mode='decode', n_layer=6, n_head=2, n_embd=64, block_size=48, device='cpu',
             contexts=12, batch_sizes=2, steps=3, dataset='none')


def flags(**settings):
    settings = FLAGS | {'against': 'llama.cpp'} | settings
    return [f'--{name}={value}' for name, value in settings.items()]


def installed():
    for name in ('llama_cpp', 'gguf'):
        pytest.importorskip(name, reason=NO_LLAMA)


@pytest.fixture
def peer(tmp_path):
    """Our model, and llama.cpp with the model's weights."""
    installed()
    torch.manual_seed(0)
    ours = with_biases(TINY)
    with torch.no_grad():
        ours.lm_head.weight.mul_(20)  # so that logits are far apart
    with contextlib.ExitStack() as stack:
        yield ours, llama.LlamaCpp(ours, tmp_path, stack)


@pytest.mark.parametrize('shape', [(1, 5), (3, 12), (3, 1)], ids=str)
def test_it_makes_our_tokens(peer, monkeypatch, shape):
    ours, theirs = peer
    monkeypatch.setattr(llama, 'PIECE', 8)  # so prompts are split, or share a piece
    prompt = torch.randint(96, shape)
    expected = Ours(ours, prompt, 6)().tokens
    with contextlib.ExitStack() as stack:
        sides = theirs.sides(prompt, 6, stack)
        for _ in range(2):  # nothing is left from the previous round
            made = {name: side() for name, side in sides.items()}
    for one in made.values():
        assert one.tokens.shape == (len(prompt), 6) and one.ttft > 0 and one.tpot > 0
    assert same_tokens(ours, prompt, expected, made[theirs.exact[0]].tokens, theirs.exact[0],
                       theirs.tolerance)['rows_equal'] == len(prompt)


@pytest.mark.parametrize('weight_dtype', ['auto', 'int8'])
def test_bench(capsys, tmp_path, weight_dtype):
    installed()
    file = tmp_path / 'peers.json'
    bench.main(flags(weight_dtype=weight_dtype, kv_dtype=weight_dtype, save=file))
    printed, found = capsys.readouterr().out, json.loads(file.read_text())
    one, = found['cells']
    assert list(one['sides']) == ['ours', *SIDES]
    assert found['max_logit_difference'] <= found['tolerance']
    assert found['models']['ours']['gelu'] == 'tanh' and found['models']['ours']['bias'] is True
    assert (one['sides'][SIDES[0]]['rows_equal'] == 2) or weight_dtype == 'int8'
    # 256 positions of float16 in each of 6 layers, for two rows
    assert one['sides']['llama.cpp f32']['kv_bytes'] == 2 * 256 * 6 * 2 * 64 * 2
    page = table.page({'peers': table.read(str(file))})
    assert all(name in text for text in (printed, page) for name in SIDES)


def test_ours_runs_as_the_settings_have_it(capsys, monkeypatch):
    """Against a fake engine, which needs no package."""
    seen = {}

    class Standin:
        exact, tolerance = ('standin',), 1e-4

        def __init__(self, ours, folder, stack):
            seen['ours'] = ours

        def facts(self):
            return {}

        def logits(self, idx):
            seen['checked'] = type(seen['ours'].lm_head)
            return seen['ours'](idx, all_logits=True)[0]

        def sides(self, prompt, steps, stack):
            return {'standin': Ours(seen['ours'], prompt, steps)}
    monkeypatch.setitem(generation.PEERS, 'llama.cpp', Standin)
    bench.main(flags(weight_dtype='int8', kv_dtype='int8', json=True))
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert seen['checked'] is not Int8Linear and type(seen['ours'].lm_head) is Int8Linear
    assert (found['dtype'], found['kv_dtype']) == ('int8', 'int8')
    ours = GPTConfig(n_layer=6, n_head=2, n_embd=64)
    assert found['cells'][0]['sides']['ours']['kv_bytes'] == plan_kv(ours).nbytes(2, 15, 'int8')


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    for name in ('llama_cpp', 'gguf'):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match='needs the package gguf: .*pip install'):
        bench.main(flags())


@pytest.mark.parametrize('change, named', [
    (dict(n_kv_head=1), 'n_kv_head=1'), (dict(compile=True), 'compile=True'),
    (dict(steps=1), 'steps=1'), (dict(budget='1GB'), 'budget=')], ids=str)
def test_what_is_refused(change, named):
    with pytest.raises(UserError, match=named):
        bench.main(flags(**change))
