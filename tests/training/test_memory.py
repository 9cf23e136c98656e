"""Memory of a step: the prediction equals the measurement, whose peak is within 10% of the
allocator's. `python -m training.memory`."""
import gc
import itertools
import json
import re
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import training.step.loss
from common.gpt_config import GPTConfig
from model import GPT
from tests.helpers.mechanisms import CHANGES
from training.native.loading import library
from training.native.modules import speed_up
from training.device import autocast
from training.step.loss import linear_cross_entropy
from training.memory.__main__ import main
from training.memory.measure import measure, predict
from training.memory.recompute import set_recompute

V, T, B, C, L = 500, 64, 2, 32, 2
BASE = dict(n_layer=L, n_head=4, n_embd=C, block_size=T, vocab_size=V, bias=False, dropout=0.0)
SHAPES = {
    'vanilla': BASE,
    'gqa': dict(BASE, n_kv_head=2, bias=True, dropout=0.1),
    'full': dict(BASE, n_kv_head=1, layer_pattern='LG', kv_share='AB', window_size=32,
                 pos_embedding='rope', qk_norm=True, attn_sink=True),
}
F32, BF16, CPU = torch.float32, torch.bfloat16, torch.device('cpu')


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    # 50 of the 128 tokens at a time
    monkeypatch.setitem(training.step.loss.CHUNK_BYTES, 'cpu', 50 * V * 4)


def predicted(config, torch_dtype=F32, accumulate=False, **changes):
    s = SimpleNamespace(**dict(
        compile=False, batch_size=B, chunked_loss=True, attention_backend='auto',
        optimizer='adamw', dtype='float32', recompute='every:2') | changes)
    return predict(s, config, CPU, torch_dtype, accumulate=accumulate)


def batch(length=T):
    x = torch.randint(V, (B, length), generator=torch.Generator().manual_seed(0))
    return x, x.roll(-1, 1)


def allocated(model, dtype):
    """The peak of a step according to the allocator: activations, loss and gradients."""
    def step():
        with autocast(CPU, dtype):
            loss = model(*batch())[1]
        loss.backward()
    step()
    model.zero_grad(set_to_none=True)
    # a tensor that an earlier profiled step left in a reference cycle must not be freed in this one
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == '[memory]']
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


@pytest.mark.parametrize('config, dtype, chunked, in_cpp, policies', [
    (SHAPES['vanilla'], F32, False, False, ('none', 'block')),
    (SHAPES['gqa'], F32, True, False, ('none', 'mlp')),
    (SHAPES['full'], F32, True, False, ('selective', 'sqrt', 'every:2')),
    (SHAPES['full'], F32, True, True, ('none', 'block')),
    (SHAPES['full'], BF16, True, True, ('none', 'mlp')),
    (SHAPES['full'] | CHANGES['many'], F32, True, False, ('none', 'block'))])
def test_predicted_is_measured_and_near_what_the_allocator_says(
        config, dtype, chunked, in_cpp, policies, monkeypatch):
    if in_cpp and library() is None:
        pytest.skip('it needs a C++ compiler')
    monkeypatch.setattr(torch.backends.mkldnn, 'enabled', False)  # its matmuls have buffers
    config = GPTConfig(**config)
    predictions = predicted(config, dtype, dtype='auto' if in_cpp else 'float32',
                            chunked_loss=chunked)
    for policy in policies:
        model = GPT(config).train()
        set_recompute(model, policy)
        model.loss_fn = linear_cross_entropy if chunked else None
        if in_cpp:
            speed_up(model)
        m = measure(model, batch(), autocast(CPU, dtype))
        assert predictions[policy] == m
        assert m.peak > m.parameters + m.optimizer + m.activations > 0
        exact = m.parameters + m.optimizer + allocated(model, dtype)
        assert m.peak == pytest.approx(exact, rel=0.1), policy


def test_a_prediction_counts_accumulation():
    config = GPTConfig(**SHAPES['full'] | dict(block_size=48))
    model = GPT(config)
    model.loss_fn = linear_cross_entropy
    once, further = (measure(model, batch(48), accumulate=each) for each in (False, True))
    assert predicted(config, accumulate=True)['none'] == further
    assert once.peak < further.peak <= once.peak + once.gradients
    assert once.activations == further.activations


# -- the program

FLAGS = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--block_size=32', '--batch_size=4',
         '--dataset=unheard_of', '--device=cpu', '--gradient_accumulation_steps=1',
         '--compile=False', '--dtype=float32']


def test_the_program_prints_predictions(capsys, monkeypatch):
    # its vocabulary is GPT-2's: the same 50 tokens at a time, not one
    monkeypatch.setitem(training.step.loss.CHUNK_BYTES, 'cpu', 50 * 50304 * 4)
    main([*FLAGS, '--recompute=every:2', '--json=True'])
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    predictions = predicted(GPTConfig(vocab_size=50304, bias=False, n_layer=2, n_head=2, n_embd=32,
                                      block_size=32), batch_size=4, block_size=32)
    assert document['policies'] == {name: vars(m) for name, m in predictions.items()}
    assert list(predictions) == ['none', 'selective', 'mlp', 'block', 'sqrt', 'every:2']
    assert re.search('^every:2 +.* MB', out, re.M)
