"""What bench.py runs: the order of timings and their ratios, bytes read per step, kernels,
requests, and vLLM next to our engine."""
import json
import math
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import bench
from attention.backends import INTERPRETING, triton_enabled
from attention.masks import dense_mask
from common.errors import UserError
from common.gpt_config import GPTConfig
from engine.engine import Engine
from engine.weights.quantize import quantize_weights, weight_bytes
from kv.plan import plan_kv
from lab.benchmarks import bandwidth, clock, serve, table
from lab.benchmarks.bandwidth import kv_read_per_step, weight_read_bytes
from lab.benchmarks.decode import DecodeRound
from tests.helpers.models import FULL_STACK, VOCAB, random_model, tokens
from tests.programs.support import flags


@pytest.fixture(autouse=True)
def _small_buffer(monkeypatch):
    monkeypatch.setattr(bandwidth, 'BUFFER_BYTES', 2 ** 20)  # what is copied to measure bandwidth


# -- timings

def test_sides_take_turns_and_the_first_round_is_not_kept():
    order = []
    sides = {name: lambda name=name: order.append(name) or len(order) for name in 'ab'}
    found = clock.alternate(sides, 3, 'test')
    assert order == ['a', 'b'] * 4
    assert found == {'a': [3, 5, 7], 'b': [4, 6, 8]}


def test_ratios_are_medians_of_pairs_not_ratios_of_medians():
    ratio = clock.paired([2.0, 30.0, 4.0, 1.0, 8.0], [1.0, 10.0, 4.0, 4.0, 1.0])
    assert ratio == {'median': 2.0, 'min': 0.25, 'max': 8.0, 'each': [2.0, 3.0, 1.0, 0.25, 8.0]}
    with pytest.raises(ValueError):
        clock.paired([1.0, 2.0], [1.0])


def test_a_decode_round_times_its_steps_and_not_the_filling(monkeypatch):
    model, calls = random_model(GPTConfig(**FULL_STACK), torch.float32), []
    seconds = [0.0]
    monkeypatch.setattr(clock, 'now', lambda: sum(seconds))

    def forwarded(_, args, output):
        seconds.append(0.25)
        calls.append((args[0], output[0]))
    model.register_forward_hook(forwarded)
    one = DecodeRound(model, 3, 10, 15, 5, 'auto')
    fill = one.cache.fill_

    def slow_fill(length):
        seconds.append(100)
        return fill(length)
    monkeypatch.setattr(one.cache, 'fill_', slow_fill)
    assert one() == one() == 0.25
    assert one.cache.lengths.tolist() == [15, 15, 15] and len(calls) == 10
    for (idx, logits), (after, _) in zip(calls[:4], calls[1:5]):
        assert idx.shape == (3, 1)
        assert torch.equal(after, logits[:, -1].argmax(-1, keepdim=True))

# -- bytes read per step: keys visible in the masks, and weights

VANILLA = dict(n_layer=2, n_head=2, n_embd=12, block_size=16, vocab_size=VOCAB)
GQA = dict(FULL_STACK, n_kv_head=2, kv_share='')


@pytest.mark.parametrize('config', [VANILLA, FULL_STACK, GQA], ids=['vanilla', 'full', 'GQA'])
def test_kv_read_is_what_each_layers_mask_lets_the_new_tokens_see(config):
    plan = plan_kv(GPTConfig(**config))
    keys = {held: sum(int(dense_mask(1, held, layer.window).sum()) for layer in plan.layers)
            for held in range(1, 12)}
    elements = 2 * plan.n_kv_head * plan.head_dim
    for held in (1, 5, 6, 9):
        found = kv_read_per_step(plan, 'float32', 3, held - 1, 1)
        assert found == keys[held] * elements * 4 * 3
        mean = (keys[held] + keys[held + 1]) / 2
        scales = 2 * plan.n_kv_head * 2
        assert kv_read_per_step(plan, 'int8', 1, held - 1, 2) == mean * (elements + scales)


@pytest.mark.parametrize('config', [VANILLA, FULL_STACK], ids=['vanilla', 'full stack'])
def test_weights_read_are_all_but_the_rows_of_wpe_that_are_not_looked_up(config):
    """The output layer reads all of wte, with which it is tied."""
    model = random_model(GPTConfig(**config), torch.float32)
    unread = 0 if model.rotary else 4 * 12 * (16 - 1)
    assert weight_read_bytes(model, 2) == weight_bytes(model) - unread


# -- --mode=kernels in Triton's interpreter, where times are meaningless

SHAPE = dict(mode='kernels', n_head=4, n_kv_head=1, n_embd=64, contexts='20,40', batch_sizes=2,
             dtype='float32', device='cpu')


@pytest.mark.skipif(not INTERPRETING, reason='interpreted where there is no GPU')
def test_every_cell_of_the_kernels_and_its_error(capsys, tmp_path):
    pytest.importorskip('triton')
    with triton_enabled(True):
        bench.main(flags(SHAPE | dict(save=tmp_path / 'kernels.json')))
    out = capsys.readouterr().out
    document = json.loads((tmp_path / 'kernels.json').read_text())
    for cell in document['decode']:
        assert set(cell['sides']) == {'kernel, int8', 'kernel', 'SDPA', 'SDPA, heads folded'}
        for name, side in cell['sides'].items():
            assert side['error'] < 1e-5
            per_key = 16 + 2 if 'int8' in name else 64
            assert side['bytes'] == 2 * 2 * cell['context'] * per_key
            speed = side['bytes'] / side['ms']['median'] * 1000
            assert side['bytes_per_second'] == pytest.approx(speed)
    assert set(document['new key'][0]['sides']) == {'kernel', 'plain torch'}
    assert 'share of a copy' in out and 'QK-norm, RoPE, int8, write and attention' in out


# -- --mode=serve: random lengths, the same requests for our engine and the baseline, and errors

SETTINGS = SimpleNamespace(kv_dtype='auto', prefill_chunk=0, repeats=5, captured=True)


def test_lengths_are_log_uniform_and_the_seeds():
    def lengths_of(text, seed=1, n=4000):
        return serve.output_lengths(SimpleNamespace(output_lengths=text, requests=n, seed=seed))
    lengths, again, other = (lengths_of('16,256', seed) for seed in (1, 1, 2))
    assert lengths == again != other and (min(lengths), max(lengths)) == (16, 256)
    assert sum(map(math.log, lengths)) / 4000 == pytest.approx(math.log(16 * 256) / 2, abs=0.05)
    assert lengths_of('5', n=3) == [5, 5, 5]
    for text in ('9,3', '1,2,3', '0,4', ''):
        with pytest.raises(UserError, match='output_lengths'):
            lengths_of(text)


def test_all_sides_give_each_request_its_tokens():
    model = random_model(GPTConfig(**FULL_STACK), torch.float32)
    lengths = [3, 9, 1, 14, 5, 2, 8]
    prompts = [[n, n + 1, 3] for n in range(7)]
    asked = model, 3, 3 + 14, lengths, SETTINGS
    sides = {'ours': serve.through_engine(*asked),
             'other': serve.through_engine(*asked, scheduler=serve.StaticScheduler)}
    found = clock.alternate(sides, 2, 'test', [prompts, prompts[::-1], prompts])
    for served in zip(*found.values()):  # state kept between rounds does no harm
        assert served[0].tokens == served[1].tokens
        for one in served:
            assert list(map(len, one.tokens)) == lengths and len(one.firsts) == 7
            assert all(0 < first <= one.seconds for first in one.firsts) and one.kv_held > 0
    texts = served[0].tokens
    assert serve.same_texts(model, prompts, texts, texts, 'x') == {'rows_equal': 7, 'rows': 7}


def test_texts_may_differ_where_rounding_decides_and_nowhere_else():
    model = random_model(GPTConfig(n_layer=2, n_head=2, n_embd=12, block_size=32,
                                   vocab_size=VOCAB), torch.float32)
    prompt = tokens(1, 4)[0].tolist()
    [ours] = serve.through_engine(model, 1, 7, [3], SETTINGS)([prompt]).tokens
    unseen = next(t for t in range(VOCAB) if t not in prompt + ours)
    same = partial(serve.same_texts, model, [prompt], [ours], [[ours[0], unseen, unseen]], 'vllm')
    with pytest.raises(UserError, match='vllm differ in token 1 of text 0'):
        same()
    with torch.no_grad():  # now the two tokens are equally likely everywhere
        model.lm_head.weight[unseen] = model.lm_head.weight[ours[1]]
    assert same() == {'rows_equal': 0, 'rows': 1}
    with torch.no_grad():
        model.lm_head.weight[unseen] *= 0.9
    with pytest.raises(UserError, match='more than rounding'):
        same()
    model.bfloat16()
    assert same()['rows_equal'] == 0  # only counted
    quantize_weights(model.float(), 'int8')
    assert same()['rows_equal'] == 0


# -- vLLM next to our engine: both get the same prompts, and times and texts are reported correctly.
# It is replaced by a fake here; tests/vllm/ has the real one

FLAGS = dict(n_layer=6, n_head=2, n_embd=64, block_size=256, pos_embedding='rope', dataset='none',
             n_kv_head=1, against='vllm', device='cpu', seed=3)


@pytest.fixture
def run(monkeypatch, capsys, recorded):
    """bench.py's document, the prompts that vLLM got, and those that our engine got."""
    pytest.importorskip('transformers')  # writes the model that vLLM reads
    asked = []

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
    ours = recorded(Engine, 'generate', lambda engine, prompts, params: prompts)

    def call(**settings):
        bench.main(flags(FLAGS | settings | dict(json=True)))
        return json.loads(capsys.readouterr().out.splitlines()[-1]), asked, ours
    return call


def test_requests_to_vllm(run):
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
