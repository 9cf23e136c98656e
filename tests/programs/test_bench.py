"""bench.py: nanoGPT's lines plus one, a JSON document, a profiler trace, and no download."""
import json
import re

import pytest
import torch

import bench
from config.errors import UserError
from config.gpt_config import GPTConfig
from tests.programs.support import ALPHABET, FULL_STACK, flags, make_tiny
from training.flops import flops_per_token

TINY = dict(dataset='tiny', device='cpu', compile=False, n_layer=1, n_head=2, n_embd=16,
            block_size=16, batch_size=3)
MEMORY = ('n_layer', 'n_kv_head', 'layer_pattern', 'window_size', 'kv_share', 'share_global_kv',
          'pos_embedding', 'qk_norm')
MEMORY_OF_FULL_STACK = {name: FULL_STACK[name] for name in MEMORY}
SMALL = TINY | MEMORY_OF_FULL_STACK


@pytest.fixture(autouse=True)
def _in_tiny_data(monkeypatch, data_root, tmp_path):
    monkeypatch.setattr(bench, 'DATA_ROOT', data_root)
    monkeypatch.chdir(tmp_path)


def run_bench(capsys, settings=TINY, **overrides):
    """Run bench.py; return its output lines after the echoed settings."""
    capsys.readouterr()
    bench.main(flags(settings | overrides))
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if not line.startswith('Overriding')]


def losses(lines):
    return [float(line.split()[-1]) for line in lines
            if re.fullmatch(r'\d+/\d+ loss: \d+\.\d{4}', line)]


def test_output_is_nanogpts_and_one_line_more(capsys):
    """It trains on the data set, without dropout."""
    *lines, time_line, flops_line = run_bench(capsys)
    steps = [line.split()[0] for line in lines if '/' in line]
    assert steps == [f'{k}/10' for k in range(10)] + [f'{k}/20' for k in range(20)]
    assert re.fullmatch(r'time per iteration: \d+\.\d{4}ms, MFU: \d+\.\d{2}%', time_line)
    assert re.fullmatch(r'counting only the keys each query sees: \d+\.\d{3} model TFLOP/s; '
                        r'[\d,]+ tokens/s', flops_line)
    real = losses(lines)
    untrained = torch.tensor(float(len(ALPHABET))).log().item()
    assert len(real) == 30 and real[0] == pytest.approx(untrained, abs=0.3)
    assert losses(run_bench(capsys, dropout=0.9, dtype='float32')) == real


def test_one_random_batch_needs_no_data_and_is_learnt(capsys):
    random = losses(run_bench(capsys, real_data=False, dataset='nowhere', n_embd=8, block_size=4))
    assert random[0] == pytest.approx(10.83, abs=0.1)  # log 50304
    assert all(after < before for before, after in zip(random, random[1:]))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_json_is_the_last_line(capsys, dtype):
    *lines, last = run_bench(capsys, SMALL, json=True, dtype=dtype)
    f = json.loads(last)
    assert (f['mode'], f['dtype'], f['threads']) == ('train', dtype, torch.get_num_threads())
    assert (f['batch_size'], f['block_size'], f['window_size']) == (3, 16, 4)
    assert f['torch'] == torch.__version__ and 'cpu' in f['device'] and f['real_data'] is True
    ms = f['step_ms']
    assert len(ms) == 20 and f['mean_ms'] == pytest.approx(sum(ms) / 20)
    assert min(ms) <= f['median_ms'] <= max(ms)
    assert f"time per iteration: {f['mean_ms']:.4f}ms" in lines[-2]
    assert f['tokens_per_second'] == pytest.approx(3 * 16 / f['mean_ms'] * 1000)
    config = GPTConfig(vocab_size=len(ALPHABET), bias=False, n_head=2, n_embd=16, block_size=16,
                       **MEMORY_OF_FULL_STACK)
    tflops = flops_per_token(config).total * f['tokens_per_second'] / 1e12
    assert f['model_tflops_per_second'] == pytest.approx(tflops)
    assert f['mfu'] > tflops / 312  # nanoGPT's formula counts keys that no query sees


def test_a_profile_is_a_table_and_a_trace(capsys, tmp_path):
    lines = run_bench(capsys, profile=True, json=True)
    assert json.loads(lines[-1])['trace'] == 'bench_log'
    trace, = (tmp_path / 'bench_log').iterdir()
    assert trace.name.endswith('.pt.trace.json')  # the suffix expected by TensorBoard's plugin
    names = {event['name'] for event in json.loads(trace.read_text())['traceEvents']}
    # nanoGPT's schedule: 5, 5, 5
    assert 'aten::mm' in names and {f'ProfilerStep#{k}' for k in range(10, 15)} <= names
    assert len(losses(lines)) == 15
    assert not any('time per iteration' in line for line in lines)
    assert any('aten::mm' in line for line in lines) and any('Self CPU' in line for line in lines)


@pytest.mark.parametrize('settings, named', [
    (dict(mode='dance'), ["mode='dance'", "'train'"]), (dict(batch_size=0), ['batch_size=0']),
    (dict(device='abacus'), ["device='abacus'", "'cpu'"]), (dict(seed=2 ** 64), ['seed=']),
    (dict(block_size=3000), ['2000 tokens', 'block_size=3000']),
    (dict(dataset='nowhere'), ["'nowhere'", 'data/nowhere/prepare.py', '--real_data=False']),
    (dict(max_iters=3), ["'max_iters'"]),
], ids=str)
def test_bad_settings(settings, named):
    with pytest.raises(UserError) as caught:
        bench.main(flags(TINY | settings))
    assert '\n' not in str(caught.value)
    assert all(text in str(caught.value) for text in named)


def test_a_data_set_is_not_prepared_by_a_benchmark(tmp_path, monkeypatch):
    make_tiny(tmp_path)
    (tmp_path / 'tiny' / 'train.bin').unlink()
    (tmp_path / 'tiny' / 'prepare.py').write_text('raise SystemError("it was run")\n')
    monkeypatch.setattr(bench, 'DATA_ROOT', tmp_path)
    message = r"'tiny'.*python data/tiny/prepare.py.*--real_data=False"
    with pytest.raises(UserError, match=message):
        bench.main(flags(TINY))
