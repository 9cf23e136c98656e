"""Memory of a step: the prediction equals the measurement, which equals the allocator's figures."""
import copy
import gc
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import training.loss
from attention.kernels.flex import _block_masks
from config.gpt_config import GPTConfig
from model import GPT
from tests.helpers.mechanisms import CHANGES
from training.device import autocast
from training.int8_forward import train_for_int8
from training.loss import linear_cross_entropy
from training.memory import Plans
from training.memory_use import Predictor, measure
from training.recompute import set_recompute
from training.z_loss import add_z_loss

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


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    # 50 of the 128 tokens at a time
    monkeypatch.setitem(training.loss.CHUNK_BYTES, 'cpu', 50 * V * 4)


class Made(dict):
    """{name of a shape: (model, predictor)}, each created once."""
    def __missing__(self, name):
        torch.manual_seed(0)
        config = GPTConfig(**SHAPES[name])
        return self.setdefault(name, (GPT(config), Predictor(config)))


@pytest.fixture(scope='module')
def made():
    return Made()


def measured_with(model, policy, autocast=None, chunked_loss=True):
    set_recompute(model, policy)
    model.loss_fn = linear_cross_entropy if chunked_loss else None
    return measure(model, batch(), autocast)


def batch():
    x = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))
    return x, x.roll(-1, 1)


@pytest.mark.parametrize('shape, policy, dtype, chunked', [
    *(('full', policy, torch.bfloat16, True) for policy in POLICIES),
    *(('gqa', policy, torch.bfloat16, True) for policy in ('none', 'selective', 'mlp')),
    ('vanilla', 'none', torch.float32, False), ('vanilla', 'block', torch.float32, False)])
def test_predicted_is_measured_to_the_byte(made, shape, policy, dtype, chunked):
    model, predictor = made[shape]
    measured = measured_with(model, policy, autocast(model.device, dtype), chunked)
    assert predictor.predict(policy, B, chunked_loss=chunked, dtype=dtype) == measured
    assert measured.policy == policy
    assert measured.peak > measured.parameters + measured.optimizer + measured.activations > 0


@pytest.mark.parametrize('name', CHANGES)
def test_predicted_is_measured_with_every_mechanism(name):
    config = GPTConfig(**SHAPES['full'] | CHANGES[name])
    model, predictor = GPT(config), Predictor(config)
    for policy in ('none', 'selective'):
        measured = measured_with(model, policy, autocast(model.device, torch.bfloat16))
        assert predictor.predict(policy, B, dtype=torch.bfloat16) == measured


@pytest.mark.parametrize('policy', ['none', 'block'])
@pytest.mark.parametrize('settings', [dict(attention_z_loss=0.1), dict(int8_forward=True)], ids=str)
def test_a_plan_counts_what_training_adds(settings, policy):
    config = GPTConfig(**SHAPES['full'], attn_sink=True)
    s = SimpleNamespace(**dict(
        gradient_accumulation_steps=1, compile=False, batch_size=B, block_size=T,
        chunked_loss=True, attention_backend='auto', optimizer='adamw', offload_optimizer=False,
        int8_forward=False, attention_z_loss=0.0) | settings)
    model, device = GPT(config), torch.device('cpu')
    plain = measured_with(model, policy)
    if s.int8_forward:
        train_for_int8(model)
    else:
        add_z_loss(model, 0.1)
    measured = measured_with(model, policy)
    assert Plans(s, config, device, torch.float32).memory(policy) == measured != plain
    if s.attention_z_loss:
        q_and_k = 2 * B * T * (C + C // 4) * 4  # in each layer
        assert measured.flops > plain.flops and measured.peak > plain.peak + q_and_k
        assert measured.activations <= plain.activations + q_and_k


def test_predicted_is_measured_with_int8_training_accumulation_and_another_length():
    config = GPTConfig(**SHAPES['full'], kv_quant_train='int8')
    x, y = (a[:, :48] for a in batch())
    model = GPT(config)
    set_recompute(model, 'selective')
    model.loss_fn = linear_cross_entropy
    measured = measure(model, (x.contiguous(), y.contiguous()), accumulate=True)
    assert Predictor(config).predict('selective', B, 48, accumulate=True) == measured


@pytest.mark.parametrize('shape, policy, chunked, dtype', [
    ('vanilla', 'none', False, torch.bfloat16), ('vanilla', 'none', True, torch.float32),
    ('gqa', 'mlp', True, torch.float32), ('full', 'sqrt', True, torch.float32)])
def test_peak_is_the_allocators(made, shape, policy, chunked, dtype, monkeypatch):
    """Except for kernels with buffers of their own: SDPA's backward in bfloat16, oneDNN matmuls."""
    monkeypatch.setattr(torch.backends.mkldnn, 'enabled', False)
    model = copy.deepcopy(made[shape][0]).train()
    measured = measured_with(model, policy, autocast(model.device, dtype), chunked)
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


def test_figures_by_hand():
    predictor = Predictor(GPTConfig(**BASE))
    m = predictor.predict('none', B, chunked_loss=False)
    N, n = sum(p.numel() for p in GPT(GPTConfig(**BASE)).parameters()), B * T
    assert (m.parameters, m.gradients) == (4 * N, 4 * N)
    mlp = L * 4 * n * 8 * C                       # hidden layer before and after GELU
    attention = L * 4 * n * (3 * C + C + 4)       # q, k, v; output; logsumexp of 4 heads
    norms = (2 * L + 1) * 4 * n * (C + 2)         # output, mean, deviation
    stream = 4 * n * C * (2 * L + 1)
    assert m.activations == mlp + attention + norms + stream + 8 * T  # and the positions
    # log-probabilities and their gradient
    assert m.loss_peak >= 2 * 4 * n * V
    chunked = predictor.predict('none', B)
    assert chunked.loss_peak < m.loss_peak / 2 and chunked.flops == m.flops
    # matmuls per token, forward and backward, and the full matrix of attention scores
    products = 3 * 2 * n * (L * 12 * C * C + V * C)
    scores = L * B * 2 * 2 * T * T * C
    # the backward pass recomputes the scores
    assert m.flops == products + scores + scores * 5 // 2


def test_block_recomputes_a_forward_pass_of_the_blocks():
    none, block = (Predictor(GPTConfig(**BASE)).predict(policy, B) for policy in ('none', 'block'))
    forward = L * (2 * B * T * 12 * C * C + B * 4 * T * T * C)
    # it ends with what is needed last, before mlp.c_proj
    assert 0.5 * forward < block.flops - none.flops <= forward


def test_measuring_leaves_nothing(made):
    model = copy.deepcopy(made['gqa'][0]).eval()
    set_recompute(model, 'mlp')
    grads = [torch.ones_like(p) for p in model.parameters()]
    for p, grad in zip(model.parameters(), grads):
        p.grad = grad
    before, masks = torch.get_rng_state(), dict(_block_masks)
    measure(model, batch(), accumulate=True)  # with dropout
    Predictor(model.config).predict('none', B)
    assert torch.equal(torch.get_rng_state(), before) and _block_masks == masks
    for p, grad in zip(model.parameters(), grads):
        assert p.grad is grad and bool((grad == 1).all())
    assert not model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(type(p) is not torch.nn.Parameter for p in model.parameters())


def test_accumulated_gradients_are_there_all_along(made):
    model = copy.deepcopy(made['vanilla'][0])
    set_recompute(model, 'none')
    model.loss_fn = None
    once, further = (measure(model, batch(), accumulate=accumulate) for accumulate in (False, True))
    assert once.peak < further.peak <= once.peak + once.gradients
    assert once.activations == further.activations


def test_the_two_gradients_of_a_tied_embedding_are_summed_in_place(made):
    """With few tokens the peak is where they are summed: the gradients, and one matrix more."""
    model = made['vanilla'][0]
    set_recompute(model, 'none')
    m = measure(model, tuple(x[:1, :2].contiguous() for x in batch()))
    rest = m.peak - m.parameters - m.optimizer - m.gradients
    assert 4 * V * C <= rest < 4 * V * C + 2048  # a few rows


def test_cuda_is_planned_for_without_cuda():
    if torch.cuda.is_available():
        pytest.skip('there is CUDA')
    assert Predictor(GPTConfig(**BASE), 'cuda').predict('none', B).device == 'cpu'
