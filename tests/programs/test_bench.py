"""bench.py on tiny shapes: nanoGPT's lines plus one, consistent figures, tables, saved files."""
import json
import re
import shlex

import pytest
import torch

import bench
from common.errors import UserError
from common.gpt_config import GPTConfig
from kv.plan import plan_kv
from lab.benchmarks import bandwidth, table
from model import GPT
from tests.programs.support import ALPHABET, FULL_STACK, flags
from training.step import loss
from training.step.flops import flops_per_token

TINY = dict(dataset='tiny', device='cpu', compile=False, n_layer=1, n_head=2, n_embd=16,
            block_size=16, batch_size=3)
MEMORY = ('n_layer', 'n_kv_head', 'layer_pattern', 'window_size', 'kv_share', 'share_global_kv',
          'pos_embedding', 'qk_norm')
MEMORY_OF_FULL_STACK = {name: FULL_STACK[name] for name in MEMORY}
SHAPE = dict(n_layer=2, n_head=2, n_embd=16, block_size=32)
SMALL = dict(SHAPE, dataset='tiny', device='cpu', contexts=12, steps=3) | MEMORY_OF_FULL_STACK
PLAN = plan_kv(GPTConfig(**SHAPE | MEMORY_OF_FULL_STACK))
# our model under nanoGPT's names
NANOGPT = '''
from model import GPT as Base, GPTConfig

class GPT(Base):
    def __init__(self, config):
        super().__init__(config)
        print('nanoGPT says something')
'''


def ratios(numerators, denominators):
    return pytest.approx([a / b for a, b in zip(numerators, denominators)])


@pytest.fixture(autouse=True)
def _in_tiny_data(monkeypatch, data_root, tmp_path):
    monkeypatch.setattr(bench, 'DATA_ROOT', data_root)
    monkeypatch.setattr(bandwidth, 'BUFFER_BYTES', 2 ** 20)
    monkeypatch.chdir(tmp_path)


def output(capsys, settings=TINY, **overrides):
    """Run bench.py; return its output lines after the echoed settings."""
    capsys.readouterr()
    bench.main(flags(settings | overrides))
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if not line.startswith('Overriding')]


def run_bench(capsys, settings, **overrides):
    """Run bench.py; return its JSON document and the table lines before it."""
    *lines, last = output(capsys, settings, **overrides, json=True)
    assert max(map(len, lines)) <= 100
    return json.loads(last), lines


def losses(lines):
    return [float(line.split()[-1]) for line in lines
            if re.fullmatch(r'\d+/\d+ loss: \d+\.\d{4}', line)]


def test_output_is_nanogpts_one_line_more_and_json(capsys):
    """It trains on the data set, without dropout."""
    settings = TINY | MEMORY_OF_FULL_STACK
    random = losses(output(capsys, real_data=False, dataset='nowhere', n_embd=8, block_size=4))
    assert random[0] == pytest.approx(10.83, abs=0.1)  # log 50304
    *lines, time_line, flops_line, last = output(capsys, settings, json=True, dtype='float32')
    steps = [line.split()[0] for line in lines if '/' in line]
    assert steps == [f'{k}/10' for k in range(10)] + [f'{k}/20' for k in range(20)]
    assert re.fullmatch(r'time per iteration: \d+\.\d{4}ms, MFU: \d+\.\d{2}%', time_line)
    assert re.fullmatch(r'counting keys that queries see: \d+\.\d{3} model TFLOP/s, '
                        r"\d+% of a matmul's \d+\.\d{3}; [\d,]+ tokens/s", flops_line)
    real = losses(lines)
    untrained = torch.tensor(float(len(ALPHABET))).log().item()
    assert len(real) == 30 and real[0] == pytest.approx(untrained, abs=0.3)
    assert losses(output(capsys, settings, dropout=0.9, dtype='float32')) == real

    f = json.loads(last)
    assert (f['mode'], f['batch_size'], f['window_size']) == ('train', 3, 4)
    ms = f['step_ms']
    assert len(ms) == 20 and f['mean_ms'] == pytest.approx(sum(ms) / 20)
    assert f"time per iteration: {f['mean_ms']:.4f}ms" in time_line
    assert f['tokens_per_second'] == pytest.approx(3 * 16 / f['mean_ms'] * 1000)
    config = GPTConfig(vocab_size=len(ALPHABET), bias=False, n_head=2, n_embd=16, block_size=16,
                       **MEMORY_OF_FULL_STACK)
    tflops = sum(flops_per_token(GPT(config))) * f['tokens_per_second'] / 1e12
    assert f['model_tflops_per_second'] == pytest.approx(tflops)
    assert f['mfu'] > tflops / 312  # nanoGPT's formula counts keys that no query sees


def test_a_profile_is_a_table_and_a_trace(capsys, tmp_path):
    lines = output(capsys, profile=True)
    trace, = (tmp_path / 'bench_log').iterdir()
    assert trace.name.endswith('.pt.trace.json')  # the suffix expected by TensorBoard's plugin
    names = {event['name'] for event in json.loads(trace.read_text())['traceEvents']}
    # nanoGPT's schedule: 5, 5, 5
    assert 'aten::mm' in names and {f'ProfilerStep#{k}' for k in range(10, 15)} <= names
    assert len(losses(lines)) == 15 and any('Self CPU' in line for line in lines)


# -- other modes -----------------------------------------------------------------------------------

def test_decode_against_vanilla(capsys):
    found, _ = run_bench(capsys, SMALL, mode='decode', against='vanilla', batch_sizes='1,3',
                         contexts='12,40')
    cells = [(cell['context'], cell['sides']['ours']['batch']) for cell in found['cells']]
    assert cells == [(12, 1), (12, 3), (40, 1), (40, 3)]
    assert found['models']['ours']['vocab_size'] == len(ALPHABET)
    theirs = found['models']['vanilla']
    assert (theirs['block_size'], theirs['n_kv_head']) == (43, 0)
    for cell in found['cells']:
        n = cell['context']
        assert (cell['held'], cell['max_seq_len']) == (n, n + 3)
        for name, p in (('ours', PLAN), ('vanilla', PLAN.vanilla())):
            side = cell['sides'][name]
            assert side['kv_bytes'] == p.nbytes(side['batch'], n + 3, 'float32')
            assert side['kv_read_bytes_per_step'] > 0 and side['bandwidth_share']['min'] > 0
        sides = [cell['sides'][name]['tokens_per_second']['each'] for name in ('ours', 'vanilla')]
        ratio = cell['ratios']['tokens_per_second']['vanilla']
        assert len(ratio['each']) == 5 and ratio['each'] == ratios(*sides)
    assert len(found['bandwidth']['bytes_per_second']['each']) == 4 * 5  # measured in every round


def test_decode_within_a_budget_reproduced_from_its_page(capsys, tmp_path):
    found, _ = run_bench(capsys, SMALL, mode='decode', against='vanilla', budget='14kB',
                             contexts='24', kv_dtype='int8', dtype='bfloat16',
                             save='budget.json')
    assert (found['kv_dtype'], found['dtype']) == ('int8', 'bfloat16')
    cell, = found['cells']
    assert (cell['held'], cell['max_seq_len']) == (21, 24)  # full after the last timed token
    for name, p in (('ours', PLAN), ('vanilla', PLAN.vanilla())):
        fit = 14_000 // p.nbytes(1, 24, 'int8')
        assert cell['capacity'][name]['sequences'] == cell['sides'][name]['batch'] == fit > 1

    assert table.read(tmp_path / 'budget.json') == found
    table.main(['budget.json'])
    page = capsys.readouterr().out
    assert page.startswith('# ') and f'## budget\n\n`{found["command"]}`' in page
    bench.main(shlex.split(found['command'])[2:] + ['--json=True'])
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (again['command'], again['models']) == (found['command'], found['models'])


def test_prefill(capsys):
    found, lines = run_bench(capsys, SMALL, mode='prefill', against='vanilla', batch_sizes='2',
                             prefill_chunk=5)
    cell, = found['cells']
    assert cell['sides']['ours']['kv_bytes'] == PLAN.nbytes(2, 12, 'float32')
    assert found['prefill_chunk'] == 5 and not any('in one piece' in line for line in lines)


def test_against_nanogpt(capsys, tmp_path):
    (tmp_path / 'nano').mkdir()
    (tmp_path / 'nano' / 'model.py').write_text(NANOGPT)
    nano = TINY | dict(against='nanogpt', nanogpt='nano', batch_size=2, dataset='tiny')
    found, lines = run_bench(capsys, nano)
    rounds = [line for line in lines if line.startswith(('19/20', '3/4 '))]
    assert len(rounds) == 10  # five turns of each
    assert found['faster']['min'] <= found['faster']['median'] <= found['faster']['max']
    assert 'times its tokens/s' in lines[-3]
    assert not any('says something' in line for line in lines)
    with pytest.raises(UserError, match='qk_norm=True'):
        bench.main(flags(nano | dict(qk_norm=True)))


def test_policies_side_by_side(capsys, monkeypatch):
    monkeypatch.setitem(loss.CHUNK_BYTES, 'cpu', 4 * 40 * 5)  # 5 tokens of the tiny alphabet
    found, _ = run_bench(capsys, SMALL, mode='recompute', contexts=24, batch_sizes=2,
                         policies='none,selective,block,every:2')
    cell, = found['cells']
    sides = cell['sides']
    held = {name: side['memory']['activations'] for name, side in sides.items()}
    assert held['none'] > held['selective'] > held['block'] > held['every:2']
    # the last norm's output, which lm_head keeps
    assert held['whole logits'] - held['none'] == 4 * 2 * 24 * 16
    for name, side in sides.items():
        assert side['activations_saved'] == pytest.approx(1 - held[name] / held['none'])
        assert side['gradient_difference'] < 1e-6 and len(side['step_ms']['each']) == 5
    peaks = [sides[name]['memory']['loss_peak'] for name in ('none', 'whole logits')]
    assert peaks[0] < peaks[1]
