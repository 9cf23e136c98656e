"""Memory of a step: the prediction equals the measurement, which equals the allocator's numbers.
The search for the largest batch, and `python -m training.memory`."""
import gc
import itertools
import json
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import training.loss
from attention.kernels.flex import _block_masks
from config.errors import UserError
from config.gpt_config import GPTConfig
from model import GPT
from tests.helpers.mechanisms import CHANGES
from training import native
from training.device import autocast
from training.loss import linear_cross_entropy
from training.memory import Plans, largest_batch, main
from training.memory_use import measure
from training.recompute import set_recompute

V, T, B, C, L = 500, 64, 2, 32, 2
BASE = dict(n_layer=L, n_head=4, n_embd=C, block_size=T, vocab_size=V, bias=False, dropout=0.0)
SHAPES = {
    'vanilla': BASE,
    'gqa': dict(BASE, n_kv_head=2, bias=True, dropout=0.1),
    'full': dict(BASE, n_kv_head=1, layer_pattern='LG', kv_share='AB', window_size=32,
                 pos_embedding='rope', qk_norm=True),
}
POLICIES = ('none', 'selective', 'mlp', 'block', 'every:2', 'sqrt', 'offload')
RNG_STATE = torch.get_rng_state().nbytes  # checkpointing keeps one for each segment, on the host
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    # 50 of the 128 tokens at a time
    monkeypatch.setitem(training.loss.CHUNK_BYTES, 'cpu', 50 * V * 4)


def planned(config, torch_dtype=F32, device='cpu', **changes):
    s = SimpleNamespace(**dict(
        gradient_accumulation_steps=1, compile=False, batch_size=B, block_size=config.block_size,
        chunked_loss=True, attention_backend='auto', optimizer='adamw', dtype='float32') | changes)
    return Plans(s, config, torch.device(device), torch_dtype)


def measured_with(model, policy, dtype=F32, chunked_loss=True, in_cpp=False, **more):
    set_recompute(model, policy)
    model.loss_fn = linear_cross_entropy if chunked_loss else None
    if in_cpp:
        native.speed_up(model)
    return measure(model, batch(), autocast(model.device, dtype), **more)


def batch():
    x = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))
    return x, x.roll(-1, 1)


# -- predicted and measured

@pytest.mark.parametrize('config, dtype, chunked, policies', [
    (SHAPES['full'], BF16, True, POLICIES), (SHAPES['gqa'], BF16, True, POLICIES[:3]),
    (SHAPES['vanilla'], F32, False, ('none', 'block')),
    *((SHAPES['full'] | changes, BF16, True, POLICIES[:2]) for changes in CHANGES.values())],
    ids=[*'abc', *CHANGES])
def test_predicted_is_measured_to_the_byte(config, dtype, chunked, policies):
    config = GPTConfig(**config)
    model, plans = GPT(config), planned(config, dtype, chunked_loss=chunked)
    for policy in policies:
        measured = measured_with(model, policy, dtype, chunked)
        assert plans.memory(policy) == measured
        assert measured.policy == policy
        assert measured.peak > measured.parameters + measured.optimizer + measured.activations > 0


@pytest.mark.parametrize('dtype', [BF16, torch.float16])
def test_in_half_precision_the_loss_holds_one_chunk_at_a_time(dtype, monkeypatch):
    """Its logits, and the same in float32; little else counts in this shape."""
    config = GPTConfig(**SHAPES['full'] | dict(vocab_size=4000))
    monkeypatch.setitem(training.loss.CHUNK_BYTES, 'cpu', 50 * 4000 * 4)
    measured = measured_with(GPT(config), 'none', dtype)
    assert 6 < measured.loss_peak / (50 * 4000) < 7


@pytest.mark.skipif(native.library() is None, reason='it needs a C++ compiler')
@pytest.mark.parametrize('dtype', [F32, BF16])
def test_predicted_is_measured_with_the_extension(dtype, monkeypatch):
    config = GPTConfig(**SHAPES['full'], attn_sink=True)
    plans = planned(config, dtype, dtype='auto')
    for policy in POLICIES[:4]:
        plain = measured_with(GPT(config), policy, dtype)
        measured = measured_with(GPT(config), policy, dtype, in_cpp=True)
        assert plans.memory(policy) == measured
        # in bfloat16 chunks are longer, but have no copy in float32
        assert measured.peak <= plain.peak * (1.02 if dtype == BF16 else 1)
        assert measured.activations <= plain.activations
    # few tokens do not take the memory of a chunk
    monkeypatch.setitem(training.loss.CHUNK_BYTES, 'cpu', 32 * 2 ** 20)
    measured = measured_with(GPT(config), 'none', dtype, in_cpp=True)
    assert measured.loss_peak < 3 * (4 * B * T * V)


@pytest.mark.parametrize('policy', ['none', 'block'])
def test_a_plan_counts_accumulation_and_another_length_than_the_models(policy):
    config = GPTConfig(**SHAPES['full'], attn_sink=True)
    model = GPT(config)
    set_recompute(model, policy)
    model.loss_fn = linear_cross_entropy
    short = tuple(x[:, :48].contiguous() for x in batch())
    plans = planned(config, block_size=48, gradient_accumulation_steps=2)
    assert plans.memory(policy) == measure(model, short, accumulate=True)


@pytest.mark.parametrize('shape, policy, chunked, dtype', [
    ('vanilla', 'none', False, BF16), ('vanilla', 'none', True, F32),
    ('gqa', 'mlp', True, F32), ('full', 'sqrt', True, F32)])
def test_peak_is_the_allocators(shape, policy, chunked, dtype, monkeypatch):
    """Except for kernels with buffers of their own: SDPA's backward in bfloat16, oneDNN matmuls."""
    monkeypatch.setattr(torch.backends.mkldnn, 'enabled', False)
    model = GPT(GPTConfig(**SHAPES[shape])).train()
    measured = measured_with(model, policy, dtype, chunked)
    x, y = batch()

    def step():
        with autocast(model.device, dtype):
            loss = model(x, y)[1]
        loss.backward()
    step()
    model.zero_grad(set_to_none=True)
    # a tensor that an earlier profiled step left in a reference cycle must not be freed in this one
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == '[memory]']
    events.sort(key=lambda event: event.start_ns())
    held = list(itertools.accumulate(event.nbytes() for event in events))
    assert held[-1] == pytest.approx(measured.gradients, abs=64)
    transient = measured.peak - measured.parameters - measured.optimizer
    states = L if policy in ('mlp', 'sqrt') else 0
    assert 0 <= max(held) - transient <= RNG_STATE * states + 2048  # a few scalars and rows


def test_bytes_and_flops_by_hand():
    config = GPTConfig(**BASE)
    m, chunked = (planned(config, chunked_loss=each).memory('none') for each in (False, True))
    N, n = sum(p.numel() for p in GPT(config).parameters()), B * T
    assert (m.parameters, m.gradients) == (4 * N, 4 * N)
    mlp = L * 4 * n * 8 * C                       # hidden layer before and after GELU
    attention = L * 4 * n * (3 * C + C + 4)       # q, k, v; output; logsumexp of 4 heads
    norms = (2 * L + 1) * 4 * n * (C + 2)         # output, mean, deviation
    stream = 4 * n * C * (2 * L + 1)
    assert m.activations == mlp + attention + norms + stream + 8 * T  # and the positions
    # log-probabilities and their gradient
    assert m.loss_peak >= 2 * 4 * n * V
    assert chunked.loss_peak < m.loss_peak / 2 and chunked.flops == m.flops
    # matmuls per token, forward and backward, and the full matrix of attention scores
    products = 3 * 2 * n * (L * 12 * C * C + V * C)
    scores = L * B * 2 * 2 * T * T * C
    # the backward pass recomputes the scores
    assert m.flops == products + scores + scores * 5 // 2

    # 'block' recomputes the forward pass, except for the last operation of a block, mlp.c_proj
    forward = L * (2 * n * 12 * C * C + B * 4 * T * T * C)
    assert 0.5 * forward < planned(config).memory('block').flops - m.flops <= forward


def test_measuring_leaves_nothing():
    model = GPT(GPTConfig(**SHAPES['gqa'])).eval()
    set_recompute(model, 'mlp')
    grads = [torch.ones_like(p) for p in model.parameters()]
    for p, grad in zip(model.parameters(), grads):
        p.grad = grad
    before, masks = torch.get_rng_state(), dict(_block_masks)
    measure(model, batch(), accumulate=True)  # with dropout
    planned(model.config).memory('selective')
    assert torch.equal(torch.get_rng_state(), before) and _block_masks == masks
    for p, grad in zip(model.parameters(), grads):
        assert p.grad is grad and bool((grad == 1).all())
    assert not model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_gradients_that_accumulate_and_the_two_of_a_tied_embedding():
    model = GPT(GPTConfig(**BASE))
    once, further = (measured_with(model, 'none', chunked_loss=False, accumulate=accumulate)
                     for accumulate in (False, True))
    assert once.peak < further.peak <= once.peak + once.gradients
    assert once.activations == further.activations

    # with few tokens the peak is where the embedding's two gradients are summed, in place
    m = measure(model, tuple(x[:1, :2].contiguous() for x in batch()))
    rest = m.peak - m.parameters - m.optimizer - m.gradients
    assert 4 * V * C <= rest < 4 * V * C + 2048  # a few rows


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is CUDA')
def test_cuda_is_planned_for_without_cuda():
    plans = planned(GPTConfig(**BASE), device='cuda')
    assert plans.device.type == 'cpu' and plans.memory('none').peak > 0


# -- the largest batch

LINES = st.lists(st.tuples(st.integers(0, 100), st.integers(1, 50)), min_size=1, max_size=3)


@given(LINES, LINES, st.integers(0, 30), st.integers(1, 1500), st.integers(1, 60))
def test_largest_batch_where_the_peak_falls_or_rises_on_the_way(below, above, whole, budget, start):
    asked = []

    def peak(n):
        asked.append(n)
        return max(fixed + each * n for fixed, each in (below if n <= whole else above))
    found = largest_batch(peak, budget, start, whole)
    assert len(asked) < 40
    fitting = [n for n in range(1, 1502) if peak(n) <= budget]
    assert found == max(fitting, default=0)


@pytest.mark.parametrize('policy, chunked', [('none', True), ('block', True), ('none', False)])
def test_predicted_peaks_fall_where_the_search_expects_it(monkeypatch, policy, chunked):
    # up to 5 sequences and a bit
    monkeypatch.setitem(training.loss.CHUNK_BYTES, 'cpu', 4 * V * (5 * 16 + 3))
    config = GPTConfig(vocab_size=V, n_layer=1, n_head=2, n_embd=16, block_size=16)
    plans = planned(config, chunked_loss=chunked)
    peaks = [plans.memory(policy, n).peak for n in range(1, 9)]
    assert [n for n in range(1, 8) if peaks[n] < peaks[n - 1]] == [5] * chunked
    assert plans.whole == 5 * chunked


# -- the program

FLAGS = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--block_size=32', '--batch_size=4',
         '--dataset=unheard_of', '--device=cpu', '--gradient_accumulation_steps=1']


def test_the_program_prints_predictions(monkeypatch, capsys):
    monkeypatch.setitem(training.loss.CHUNK_BYTES, 'cpu', 32 * 2 ** 20)  # many more words here
    main([*FLAGS, '--batch_size=6', '--budget=61MB', '--json=True'])  # small: the search ends soon
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    rows = {row['policy']: row for row in document['policies']}
    assert list(rows) == ['none', 'selective', 'mlp', 'block', 'sqrt']
    plans = planned(GPTConfig(vocab_size=50304, bias=False, n_layer=2, n_head=2, n_embd=32,
                              block_size=32))
    for policy in ('none', 'block'):
        row, at = rows[policy], plans.memory(policy, 6)
        n = row['largest_batch']
        assert (row['peak'], row['activations']) == (at.peak, at.activations)
        assert n > 6 and row['largest_peak'] == plans.memory(policy, n).peak <= 61e6
        assert plans.memory(policy, n + 1).peak > 61e6
    assert rows['none']['recomputed'] == 0 < rows['block']['recomputed']
    assert re.search(rf"^none .* {rows['none']['largest_batch']} ", out, re.M)


@pytest.mark.parametrize('flag, words', [
    ('--budget=much', "budget='much': a number of at least 1 is needed"),
    ('--budget=1MB', 'nothing fits; the least is '),
    ('--batch_size=0', 'must be at least 1'), ('--device=nowhere', 'cannot be used here'),
    ('--n_head=5', 'n_head')])
def test_wrong_input_is_one_line(monkeypatch, flag, words):
    monkeypatch.setitem(training.loss.CHUNK_BYTES, 'cpu', 32 * 2 ** 20)
    with pytest.raises(UserError, match=words):
        main([*FLAGS, flag])
