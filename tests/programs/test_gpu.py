"""The programs on a GPU give what the CPU gives (`lab/scripts/gpu_check.sh --part=exact`)."""
import json
import math
import os
import subprocess
import sys

import pytest
import torch

import bench
from config.gpt_config import GPTConfig
from engine.steps.captured import CapturedDecode, captured_decode
from engine.engine import Engine
from engine.requests.params import SamplingParams
from engine.requests.sampler import TopPSampler
from generate import Generation
from lab.benchmarks import bandwidth
from model import GPT
from tests.helpers.models import FULL_STACK as MODEL
from tests.helpers.models import VOCAB, random_model
from tests.programs.support import FULL_STACK, HARD, ROOT, VANILLA, flags, losses, run_train

pytestmark = pytest.mark.gpu
GPU = dict(device='cuda', dtype='float32', tf32=False)
# head sizes that FlexAttention accepts
BIG = dict(n_head=4, n_embd=128, head_dim=32, block_size=64, n_kv_head=1)


def assert_near(run, other, atol=1e-4):
    expected = [row['loss'] for row in other.rows]
    assert [row['loss'] for row in run.rows] == pytest.approx(expected, abs=atol)


def assert_learns(rows, first=2.8):
    assert rows[0]['loss'] < first and rows[-1]['loss'] < 0.8 * rows[0]['loss']
    assert all(math.isfinite(row['loss']) for row in rows)


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize('config, atol', [
    (dict(VANILLA, max_iters=10), 2e-3), (dict(FULL_STACK, max_iters=3), 2e-3)],
    ids=['vanilla', 'full stack'])
def test_the_losses_of_the_cpu(tmp_path, config, atol):
    """Weights and batches are those of the host: only rounding differs, which training amplifies
    (weights changed by 2e-7 change the full stack's fifth loss by 0.006 on a CPU)."""
    cpu = run_train(tmp_path / 'cpu', config)
    assert_near(run_train(tmp_path / 'gpu', config, **GPU), cpu, atol)


@pytest.mark.parametrize('changes', [
    *(dict(dtype=dtype, compile=compiled)
      for dtype in ('bfloat16', 'float16') for compiled in (False, True)),
    GPU | dict(optimizer='muon')], ids=str)
def test_it_learns(tmp_path, changes):
    config = FULL_STACK | BIG | dict(device='cuda', max_iters=40, lr_decay_iters=40) | changes
    rows = run_train(tmp_path, config).rows
    assert_learns(rows)
    assert rows[-1]['memory_peak_bytes'] > 0
    assert changes['dtype'] != 'float16' or rows[-1]['loss_scale'] >= 1


@pytest.mark.parametrize('policy', ['selective', 'block', 'offload'])
@pytest.mark.parametrize('backend', ['sdpa', 'flex'])
def test_recomputation_changes_nothing(tmp_path, policy, backend):
    config = FULL_STACK | BIG | GPU | dict(attention_backend=backend, max_iters=6)
    plain = run_train(tmp_path / 'plain', config)
    other = run_train(tmp_path / 'other', config, recompute=policy)
    assert_near(other, plain)


def test_resuming_is_exact(tmp_path):
    config = FULL_STACK | HARD | GPU
    whole = run_train(tmp_path / 'whole', config)
    run_train(tmp_path / 'parts', config, max_iters=10)
    parts = run_train(tmp_path / 'parts', config, init_from='resume')
    assert_near(parts, whole)


def test_one_process_under_torchrun(tmp_path, data_root):
    settings = dict(dataset='recall', recall_task='distances=3', block_size=20, device='cuda',
                    out_dir=tmp_path, max_iters=5)
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=1',
               'train.py', *flags(VANILLA | settings)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path)) == 6


# -- sampling --------------------------------------------------------------------------------------

def test_a_generation_never_waits_for_the_device():
    model = GPT(GPTConfig(**MODEL)).cuda().bfloat16().eval()
    cache = model.new_cache(1, 70)
    sampler = TopPSampler(temperature=0.8, top_k=5, top_p=0.9)
    generation = Generation(model, [[1, 2, 3]], 60, sampler,
                            cache, decode=captured_decode(model, cache))
    made = [next(generation) for _ in range(5)]  # the prompt, the capture
    torch.cuda.set_sync_debug_mode('error')
    try:
        made += [next(generation) for _ in range(50)]
    finally:
        torch.cuda.set_sync_debug_mode('default')
    assert all(0 <= token < VOCAB for token in torch.cat(made, dim=1).flatten().tolist())


@pytest.mark.parametrize('kv_dtype, asynchronous, temperature', [
    ('auto', True, 0), ('int8', True, 0), ('auto', False, 0), ('auto', True, 0.5)])
def test_the_engine_gives_the_texts_of_the_cpu(kv_dtype, asynchronous, temperature):
    prompts = [[k % VOCAB] * (1 + 7 * k % 11) for k in range(9)]
    params = [SamplingParams(max_new_tokens=5 + 3 * k, temperature=temperature, seed=k)
              for k in range(9)]
    texts = []
    for device in ('cpu', 'cuda'):
        model = random_model(GPTConfig(**MODEL), torch.float32).to(device)
        engine = Engine(model, 4, 48, kv_dtype, page_size=8, prefill_chunk=8,
                        asynchronous=asynchronous)
        texts.append([completion.tokens for completion in engine.generate(prompts, params)])
        assert isinstance(engine.fast_decode, CapturedDecode) == (device == 'cuda')
    # rounding may break a tie differently, after which the text differs
    assert sum(a == b for a, b in zip(*texts)) >= 7


# -- benchmarks ------------------------------------------------------------------------------------


@pytest.mark.parametrize('settings', [
    dict(mode='decode', against='vanilla', batch_sizes='1,3', steps=4, compile=True),
    dict(mode='decode', steps=4, kv_dtype='int8'),
    dict(mode='prefill'),
    dict(mode='serve', batch_sizes='2', requests=4, output_lengths='2,8'),
    dict(mode='recompute', policies='none,block,offload'),
    dict(mode='train', real_data=False, profile=True, device='cuda:0'),
    dict(mode='kernels', contexts='64', batch_sizes='2')], ids=lambda s: s['mode'])
def test_bench(capsys, monkeypatch, settings, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bandwidth, 'BUFFER_BYTES', 2 ** 24)
    stack = FULL_STACK | BIG | dict(window_size=16)
    shape = {name: value for name, value in stack.items() if hasattr(GPTConfig, name)}
    more = {} if settings['mode'] == 'train' else dict(contexts='30')
    bench.main(flags(shape | more | dict(device='cuda', dtype='bfloat16', json=True) | settings))
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document['device'] == torch.cuda.get_device_name() or 'trace' in document
    if settings['mode'] == 'kernels':
        sides = document['decode'][0]['sides']
        for name, side in sides.items():
            assert 'failed' in side or side['error'] < 5e-2, name
        assert 'failed' not in sides['kernel, int8']
