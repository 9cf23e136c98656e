"""Memory of a step: predicted without memory equals measured, measured equals what the allocator says."""
import copy
import re

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import training.loss
from attention.kernels.flex import _block_masks
from config.gpt_config import GPTConfig
from config.sizes import nice_bytes
from model import GPT
from training.device import autocast, memory_use
from training.loss import linear_cross_entropy
from training.memory_use import (
    Predictor,
    StorageTracker,
    measure,
    memory_line,
    predict,
    state_bytes,
)
from training.recompute import policy_of, set_recompute

V, T, B, C, L = 500, 64, 2, 32, 2
BASE = dict(n_layer=L, n_head=4, n_embd=C, block_size=T, vocab_size=V, bias=False, dropout=0.0)
SHAPES = {
    'vanilla': BASE,
    'gqa': dict(BASE, n_kv_head=2, bias=True, dropout=0.1),
    'full': dict(BASE, n_kv_head=1, layer_pattern='LG', kv_share='AB', window_size=32, pos_embedding='rope', qk_norm=True),
}
POLICIES = ('none', 'selective', 'mlp', 'block', 'every:2', 'sqrt', 'offload')
RNG_STATE = torch.get_rng_state().nbytes  # checkpointing keeps one for each segment, on the host


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setitem(training.loss.CHUNK_BYTES, 'cpu', 50 * V * 4)  # 50 of the 128 tokens at a time


class Made(dict):
    """Name of a shape -> its model and its predictor, made once."""
    def __missing__(self, name):
        torch.manual_seed(0)
        config = GPTConfig(**SHAPES[name])
        return self.setdefault(name, (GPT(config), Predictor(config)))


@pytest.fixture(scope='module')
def made():
    return Made()


def batch():
    x = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))
    return x, x.roll(-1, 1)


@pytest.mark.parametrize('policy, dtype, chunked', [(policy, torch.bfloat16, True) for policy in POLICIES]
                         + [(policy, torch.float32, False) for policy in ('none', 'selective', 'block')])
@pytest.mark.parametrize('shape', SHAPES)
def test_predicted_is_measured_to_the_byte(made, shape, policy, dtype, chunked):
    model, predictor = made[shape]
    measured = measure(model, batch(), policy, autocast(model.device, dtype), chunked_loss=chunked)
    assert predictor.predict(policy, B, chunked_loss=chunked, dtype=dtype) == measured
    assert measured.policy == policy
    assert sum(measured.by_kind.values()) == measured.activations > sum(measured.by_block) > 0
    assert measured.peak > measured.parameters + measured.optimizer + measured.activations
    assert ('cast weights' in measured.by_kind) == (dtype == torch.bfloat16 and policy in ('none', 'mlp', 'offload'))


def test_predicted_is_measured_with_int8_training_accumulation_and_another_length():
    config = GPTConfig(**SHAPES['full'], kv_quant_train='int8')
    x, y = (a[:, :48] for a in batch())
    measured = measure(GPT(config), (x.contiguous(), y.contiguous()), 'selective', chunked_loss=True, accumulate=True)
    assert predict(config, B, 48, 'selective', accumulate=True) == measured


@pytest.mark.parametrize('shape, policy, chunked, dtype', [
    ('vanilla', 'none', False, torch.bfloat16), ('vanilla', 'none', True, torch.float32),
    ('full', 'none', True, torch.bfloat16), ('gqa', 'mlp', True, torch.float32), ('full', 'sqrt', True, torch.float32)])
def test_peak_is_the_allocators(made, shape, policy, chunked, dtype, monkeypatch):
    """Where it is not in a kernel with buffers of its own, such as SDPA's backward pass in bfloat16, or oneDNN's products on a
    CPU with instructions for it."""
    monkeypatch.setattr(torch.backends.mkldnn, 'enabled', False)
    model = copy.deepcopy(made[shape][0]).train()
    measured = measure(model, batch(), policy, autocast(model.device, dtype), chunked_loss=chunked)
    set_recompute(model, policy)
    model.loss_fn = linear_cross_entropy if chunked else None
    x, y = batch()

    def step():
        with autocast(model.device, dtype):
            loss = model(x, y)[1]
        loss.backward()
    step()
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [(e.start_ns(), e.nbytes()) for e in profiler.profiler.kineto_results.events() if e.name() == '[memory]']
    now = peak = 0
    for _, n in sorted(events, key=lambda event: event[0]):
        now += n
        peak = max(peak, now)
    assert now == pytest.approx(measured.gradients, abs=64)
    transient = measured.peak - measured.parameters - measured.optimizer
    assert 0 <= peak - transient <= RNG_STATE * (L if policy in ('mlp', 'sqrt') else 0) + 2048  # a few scalars and rows


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('shape', SHAPES)
def test_what_is_kept_is_what_hooks_on_saved_tensors_see(made, shape, dtype):
    """Without recomputation. With it they do not see what is cached, nor what comes as an argument."""
    model = made[shape][0].train()
    x, y = batch()
    model(x)  # rotary tables are there before
    with StorageTracker(model) as live, autocast(model.device, dtype):
        loss = model(x, y)[1]
    kept = live.total
    del loss
    known = {p.untyped_storage()._cdata for p in model.parameters()}
    known |= {a.untyped_storage()._cdata for a in (x, y)}
    known |= {t.untyped_storage()._cdata for r in (model.rotary or {}).values() for pair in r._tables.values() for t in pair}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(model.device, dtype):
        loss = model(x, y)[1]
    counted = sum(storage.nbytes() for key, storage in saved.items() if key not in known)
    # the rest: the loss, which is not saved; and dropout's probability is no tensor
    assert 0 <= kept - counted <= loss.nbytes


def test_figures_by_hand():
    m = predict(GPTConfig(**BASE), B, chunked_loss=False)
    N, n = sum(p.numel() for p in GPT(GPTConfig(**BASE)).parameters()), B * T
    assert (m.parameters, m.gradients) == (4 * N, 4 * N)
    assert m.by_kind['mlp'] == L * 4 * n * 8 * C                 # hidden layer before and after GELU
    assert m.by_kind['attention'] == L * 4 * n * (3 * C + C + 4)   # q, k, v; output; logsumexp of 4 heads
    assert m.by_kind['norms'] == (2 * L + 1) * 4 * n * (C + 2)    # output, mean, deviation
    assert m.by_block == [m.by_block[0]] * L
    assert m.loss_peak >= 2 * 4 * n * V                            # log-probabilities and their gradient
    chunked = predict(GPTConfig(**BASE), B)
    assert chunked.loss_peak < m.loss_peak / 2 and chunked.flops == m.flops
    # products of a token, forward and backward, and attention's scores counted whole
    products = 3 * 2 * n * (L * 12 * C * C + V * C)
    scores = L * B * 2 * 2 * T * T * C
    assert m.flops == products + scores + scores * 5 // 2          # the backward pass computes the scores again


def test_block_recomputes_a_forward_pass_of_the_blocks():
    none, block = (predict(GPTConfig(**BASE), B, policy=policy) for policy in ('none', 'block'))
    forward = L * (2 * B * T * 12 * C * C + B * 4 * T * T * C)
    assert 0.5 * forward < block.flops - none.flops <= forward     # it ends with what is needed last, before mlp.c_proj


def test_activations_shrink_from_policy_to_policy(made):
    predictor = made['vanilla'][1]
    kept = [predictor.predict(policy, B).activations for policy in ('none', 'mlp', 'block', 'sqrt')]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 4


def test_measuring_leaves_nothing(made):
    model = copy.deepcopy(made['gqa'][0]).eval()
    model.loss_fn = linear_cross_entropy
    set_recompute(model, 'mlp')
    grads = [torch.ones_like(p) for p in model.parameters()]
    for p, grad in zip(model.parameters(), grads):
        p.grad = grad
    before, masks = torch.get_rng_state(), dict(_block_masks)
    measure(model, batch(), 'block', chunked_loss=False, accumulate=True)  # with dropout
    predict(model.config, B)
    assert torch.equal(torch.get_rng_state(), before) and _block_masks == masks
    assert all(p.grad is grad and bool((grad == 1).all()) for p, grad in zip(model.parameters(), grads))
    assert not model.training and policy_of(model) == 'mlp' and model.loss_fn is linear_cross_entropy
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(type(p) is not torch.nn.Parameter for p in model.parameters())


def test_optimizer_state_is_what_adamw_makes(capsys):
    model = GPT(GPTConfig(**BASE))
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), 'cpu')
    planned = state_bytes(model, optimizer)
    model(*batch())[1].backward()
    optimizer.step()
    assert state_bytes(model, optimizer) == planned == state_bytes(model)


def test_accumulated_gradients_are_there_all_along(made):
    model = made['vanilla'][0]
    once, further = (measure(model, batch(), accumulate=accumulate) for accumulate in (False, True))
    assert once.peak < further.peak <= once.peak + once.gradients
    assert once.activations == further.activations


def test_cuda_is_planned_for_without_cuda():
    if torch.cuda.is_available():
        pytest.skip('there is CUDA')
    assert predict(GPTConfig(**BASE), B, device='cuda').device == 'cpu'


def test_memory_line(made):
    model = made['vanilla'][0]
    before = memory_use(model.device).peak
    line = memory_line(model, 'adamw', model.device)
    n = 4 * sum(p.numel() for p in model.parameters())
    assert line.startswith(f'memory: parameters {nice_bytes(n)}, gradients {nice_bytes(n)}, optimizer ')
    peak, unit = re.search(r',\n        peak ([\d,.]+) ([MG])B \(of the whole process, with Python and '
                           r'torch\)$', line).groups()  # of all tests before, too
    assert 50e6 < before <= float(peak.replace(',', '')) * {'M': 1e6, 'G': 1e9}[unit] * 1.01
