"""Training steps in C++ (training/native): every operator against float64, and whole models against
plain torch."""
import copy
import functools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from attention import causal_attention
from attention.causal import expand_heads, math_attention
from attention.masks import dense_mask
from attention.rope import RotaryTable, apply_rope
from common.gpt_config import GPTConfig
from model import GPT
from tests.helpers.models import FULL_STACK, VOCAB
from training.step import loss
from training.memory.recompute import set_recompute
from training.native import loading, modules

pytestmark = pytest.mark.skipif(loading.library() is None, reason='it needs a C++ compiler')


def results(f, inputs, dtype, grad):
    """f of the inputs in this dtype, and the gradient of each, in float64."""
    inputs = [None if x is None else x.to(dtype).detach().requires_grad_() for x in inputs]
    y = f(*inputs)
    y.backward(grad.to(dtype))
    return [x.double() for x in (y.detach(), *(x.grad for x in inputs if x is not None))]


def assert_as_close_as_torch(ours, torchs, exact, inputs, margin=2.0, dtype=torch.float32):
    """Largest differences from float64 are at most `margin` times torch's own, or 1e-6 (in bfloat16
    1.01 times, or its last bit)."""
    margin, least = (margin, 1e-6) if dtype == torch.float32 else (1.01, 2 ** -8)
    inputs = [None if x is None else x.to(dtype) for x in inputs]
    grad = torch.randn_like(exact(*(None if x is None else x.double() for x in inputs))).to(dtype)
    wanted = results(exact, inputs, torch.float64, grad)
    pairs = [results(f, inputs, dtype, grad) for f in (ours, torchs)]
    for found, other, right in zip(*pairs, wanted, strict=True):
        error, torchs_error = (found - right).abs().max(), (other - right).abs().max()
        assert error <= max(margin * torchs_error, least * right.abs().max())


@pytest.mark.parametrize('B, H, n_kv_head, D, T, window, with_sink, dtype', [
    (2, 4, 1, 16, 1, 0, True, torch.float32), (1, 6, 2, 20, 7, 3, False, torch.bfloat16),
    (3, 2, 2, 64, 33, 0, False, torch.bfloat16), (2, 4, 1, 16, 70, 8, False, torch.bfloat16),
    (1, 6, 2, 20, 70, 200, True, torch.float32), (3, 2, 2, 64, 200, 64, True, torch.float32),
    (1, 6, 2, 20, 200, 0, False, torch.float32), (3, 2, 2, 64, 7, 3, False, torch.float32)])
def test_attention_is_what_float64_gives(B, H, n_kv_head, D, T, window, with_sink, dtype):
    torch.manual_seed(T)
    q, (k, v) = torch.randn(B, H, T, D), torch.randn(2, B, n_kv_head, T, D)
    sink = torch.randn(H) if with_sink else None

    def of(attend):
        return lambda q, k, v, sink: attend(q, k, v, window=window, sink=sink)
    assert_as_close_as_torch(of(modules.attend), of(causal_attention), of(math_attention),
                             (q, k, v, sink), margin=4.0, dtype=dtype)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('window', [0, 20])
def test_several_threads_share_a_k_v_head(window, dtype):
    """Each has some of its queries, and sums of its own for the gradients of K and V."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        test_attention_is_what_float64_gives(1, 4, 1, 16, 101, window, False, dtype)
    finally:
        torch.set_num_threads(n_threads)


def test_weights_far_below_the_largest_are_exactly_0():
    """In both passes. The first value is so large that a weight above 0 shows."""
    q, k, v = torch.ones(1, 2, 30, 16), torch.zeros(1, 1, 30, 16), torch.ones(1, 1, 30, 16)
    k[:, :, 0], found = -95 / 4, []
    for value in (0, 1e37):
        v[:, :, 0] = value
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        y = modules.attend(*inputs)[:, :, 7:]
        y.sum().backward()
        found.append((y, *(x.grad for x in inputs)))
    assert all(map(torch.equal, *found))
    logits = torch.zeros(2, 40).index_fill_(1, torch.arange(3, 38), -90.0)
    modules.softmax_gradients(logits, torch.tensor([0, 39]), -1, True)
    assert not logits[:, 3:38].any() and logits[:, :3].all()
    for approximate in ('none', 'tanh'):
        x = torch.linspace(-60, -14, 99).requires_grad_()
        modules.GELU(approximate)(x).sum().backward()
        assert not x.grad.any()


def test_dropout_drops_the_same_weights_in_both_passes():
    torch.manual_seed(0)
    B, H, T, D, window, p = 2, 4, 48, 48, 20, 0.3
    q, k = torch.randn(B, H, T, D), torch.randn(B, 1, T, D)
    eye = torch.eye(T).expand(B, 1, T, T)  # as V it shows the weights
    torch.manual_seed(5)
    dropped = modules.attend(q, k, eye, window, p)
    plain = causal_attention(q, k, eye, window)
    kept = dropped != 0
    seen = dense_mask(T, T, window).expand_as(kept)
    torch.testing.assert_close(dropped[kept], plain[kept] / (1 - p), atol=1e-6, rtol=1e-5)
    n = int(seen.sum())
    assert abs(int(kept.sum()) - n * (1 - p)) < 4 * (n * p * (1 - p)) ** 0.5
    assert len({tuple(row.tolist()) for row in kept[:, :, -1].flatten(0, 1)}) == B * H

    v = torch.randn(B, 1, T, D)
    factor = kept.double() / (1 - p)

    def exact(q, k, v):
        scores = q @ expand_heads(k, H).transpose(2, 3) * D ** -0.5
        weights = scores.masked_fill(~dense_mask(T, T, window), -torch.inf).softmax(-1)
        return (weights * factor) @ expand_heads(v, H)
    grad = torch.randn(B, H, T, D)

    def ours(q, k, v):
        torch.manual_seed(5)
        return modules.attend(q, k, v, window, p)
    pairs = zip(results(ours, (q, k, v), torch.float32, grad),
                results(exact, (q, k, v), torch.float64, grad), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-5


DTYPES = torch.float32, torch.bfloat16


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('tanh', [False, True])
def test_gelu_is_what_float64_gives(tanh, dtype):
    torch.manual_seed(0)
    plain = torch.nn.GELU('tanh' if tanh else 'none')
    ours = copy.copy(plain)
    ours.__class__ = modules.GELU
    for x in (torch.randn(5003) * 3, torch.linspace(-30, 30, 1000), torch.randn(3)):
        assert_as_close_as_torch(ours, plain, plain, (x,), dtype=dtype)
    special = torch.tensor([0.0, torch.inf, torch.nan, 100.0, -100.0], dtype=dtype)
    # torch's own gives NaN for inf on AVX-512
    expected = torch.tensor([0.0, torch.inf, torch.nan, 100.0, 0.0], dtype=dtype)
    torch.testing.assert_close(ours(special), expected, equal_nan=True)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('D, rotate', [(8, True), (18, True), (24, False), (64, True)])
def test_norm_and_rotation_are_what_float64_gives(D, rotate, dtype):
    torch.manual_seed(D)
    x, gain, table = torch.randn(2, 50, 3, D), torch.rand(D) + 0.5, RotaryTable(D, 1e4)

    def of(f):
        def apply(x, gain):
            rope = table(0, 50, 'cpu', x.dtype) if rotate else None
            return f(x.transpose(1, 2), SimpleNamespace(weight=wide(gain), eps=1e-6), rope)
        return apply

    def wide(x):  # gains are not in bfloat16
        return x.float() if x.dtype == torch.bfloat16 else x

    def plain(x, norm, rope):
        y = wide(x)
        y = y * (y.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight
        return (apply_rope(y, *rope) if rope else y).to(x.dtype)
    assert_as_close_as_torch(of(modules.normed_and_rotated), of(plain), of(plain), (x, gain),
                             dtype=dtype)


VANILLA = dict(n_layer=2, n_head=4, n_embd=24, block_size=64, vocab_size=VOCAB)
@pytest.mark.parametrize('N, V', [(50, 37), (300, 1024), (9, 5)])
def test_cross_entropy_is_what_float64_gives(N, V):
    torch.manual_seed(V)
    x, weight, targets = torch.randn(N, 24), torch.randn(V, 24), torch.randint(V, (N,))
    targets[3] = -1

    def plain(x, weight):
        return F.cross_entropy(x @ weight.T, targets, ignore_index=-1)

    def ours(x, weight):
        return loss.linear_cross_entropy(x, weight, targets, gradients=modules.softmax_gradients)
    assert_as_close_as_torch(ours, plain, plain, (x, weight))
    with torch.no_grad():
        assert ours(x, weight) == pytest.approx(plain(x, weight).item(), rel=1e-6)
    for bad in (V, -2):
        targets[0] = bad
        with pytest.raises(IndexError, match=f'logits of 0 to {V - 1}'):
            ours(x, weight)
    x[1] = torch.nan
    targets[0] = 0
    assert ours(x, weight).isnan()


@pytest.mark.parametrize('V', [37, 1024])
def test_cross_entropy_of_bfloat16_is_that_of_its_numbers_in_float64(V):
    """The loss is in float32; only the gradients are rounded to bfloat16."""
    torch.manual_seed(V)
    logits, targets = (4 * torch.randn(50, V)).bfloat16(), torch.randint(V, (50,))
    targets[3] = -1
    exact = logits.double().requires_grad_()
    wanted = F.cross_entropy(exact, targets, ignore_index=-1, reduction='sum')
    wanted.backward()
    total, gradients = modules.softmax_gradients(logits, targets, -1, True)
    assert total.dtype == torch.float32 and total.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert gradients is logits
    torch.testing.assert_close(gradients.double(), exact.grad, rtol=2 ** -8, atol=1e-9)


def test_sums_of_bfloat16_are_added_in_float32():
    total, part = torch.randn(5, 7), torch.randn(5, 7).bfloat16()
    wanted = total + part
    modules.add_in_place(total, part)
    assert torch.equal(total, wanted)
    modules.add_in_place(total.t(), part.t())  # not contiguous
    assert torch.equal(total, wanted + part)


def test_an_embedding_shares_the_gradient_of_its_own_loss_only():
    """Passes one after the other or summed, two losses of one pass, other uses of the weight, a
    loss of something else, a weight that is not tied."""
    def gradient(uses, fast):
        torch.manual_seed(0)
        embedding, other = torch.nn.Embedding(9, 4), torch.nn.Parameter(torch.randn(9, 4))
        loss_of = loss.linear_cross_entropy
        if fast:
            embedding.__class__ = modules.Embedding
            loss_of = functools.partial(modules.linear_cross_entropy, embedding)
        total = 0
        for use in uses:
            idx, targets = torch.randint(9, (2, 3)), torch.randint(9, (6,))
            x = embedding(idx).flatten(0, 1).sin()
            weight = other if use == 'other' else embedding.weight
            if use == 'detached':
                x = x.detach()
            value = x.sum() if use == 'no loss' else loss_of(x, weight, targets)
            if use == 'two losses':
                value = value + loss_of(2 * x, weight, targets.flip(0))
            if use == 'penalty':
                value = value + weight.square().mean()
            if use == 'of inputs':
                torch.autograd.grad(value, x, retain_graph=True)
                value = x.sum()
            if use in ('summed', 'two losses', 'penalty'):
                total = total + value
            elif use != 'forward only':
                value.backward()
        if torch.is_tensor(total):
            total.backward()
        return embedding.weight.grad
    for uses in (['summed'] * 3, ['two losses', 'summed'], ['penalty'], ['penalty', 'summed'],
                 ['detached', 'tied'], ['tied', 'detached'],
                 ['tied'], ['tied', 'tied'], ['no loss', 'tied'], ['forward only', 'no loss'],
                 ['other', 'tied'], ['of inputs', 'tied'], ['tied', 'forward only', 'other']):
        torch.testing.assert_close(gradient(uses, True), gradient(uses, False), msg=str(uses))


MECHANISMS = dict(
    vanilla=VANILLA, full=FULL_STACK, sink=dict(FULL_STACK, attn_sink=True),
    offset=dict(FULL_STACK, head_dim=8, key_offset=True), tied=dict(FULL_STACK, kv_tied='all'),
    int8=dict(FULL_STACK, kv_quant_train='int8'), relu2=dict(FULL_STACK, gelu='relu2'),
    tanh=dict(VANILLA, gelu='tanh', bias=True))


def losses_and_gradients(model, T, policy='none'):
    set_recompute(model, policy)
    torch.manual_seed(2)
    idx, targets = torch.randint(model.config.vocab_size, (2, 3, T))
    model.zero_grad()
    value = model(idx, targets)[1]
    value.backward()
    return value.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize('name', MECHANISMS)
def test_models_train_as_in_plain_torch(name):
    torch.manual_seed(1)
    model = GPT(GPTConfig(**MECHANISMS[name])).train()
    model.loss_fn = loss.linear_cross_entropy
    T = model.config.block_size
    plain = losses_and_gradients(model, T)
    modules.speed_up(model)
    found = losses_and_gradients(model, T)
    torch.testing.assert_close(found[0], plain[0], atol=1e-6, rtol=1e-6)
    for key, grad in plain[1].items():
        torch.testing.assert_close(found[1][key], grad, atol=2e-5, rtol=1e-3, msg=key)
    for policy in ('none', 'selective', 'block', 'mlp'):  # the same bits, and with recomputation
        value, grads = losses_and_gradients(model, T, policy)
        assert value == found[0]
        assert all(torch.equal(grads[key], grad) for key, grad in found[1].items()), policy


def test_every_operator_is_used():
    """And attention is kept by the policy 'selective', as torch's is."""
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found[func.name()] += 1
            return func(*args, **(kwargs or {}))
    model, found = GPT(GPTConfig(**FULL_STACK)), Counter()
    model.loss_fn = loss.linear_cross_entropy
    modules.speed_up(model)
    with Names():
        losses_and_gradients(model, 32, 'selective')
    n = model.config.n_layer
    assert found['nanokv::attention'] == found['nanokv::attention_backward'] == n
    assert found['nanokv::norm'] == 2 * found['nanokv::norm_backward'] > n  # recomputed
    assert found['nanokv::gelu'] == 3 * n
    assert found['nanokv::cross_entropy'] == 1
    assert not found['aten::embedding_dense_backward']


def test_what_it_does_not_take_is_torchs():
    model = GPT(GPTConfig(**FULL_STACK)).double()
    plain = losses_and_gradients(model, 32)
    modules.speed_up(model)
    value, grads = losses_and_gradients(model, 32)
    assert value == plain[0] and all(torch.equal(grads[key], x) for key, x in plain[1].items())


def test_attention_of_an_unknown_field_is_torchs_and_other_activations_stay(monkeypatch):
    known, unknown = (GPT(GPTConfig(**FULL_STACK, attn_gate=gate)) for gate in (False, True))
    known.transformer.h[1].mlp.gelu = torch.nn.SiLU()
    field = GPTConfig.__dataclass_fields__['attn_gate']
    monkeypatch.setattr(field, 'metadata', {**field.metadata, 'known': ()})
    for model in (known, unknown):
        modules.speed_up(model)
    assert [type(block.mlp.gelu) for block in known.transformer.h[:2]] == [modules.GELU,
                                                                          torch.nn.SiLU]
    attends = [model.transformer.h[0].attn.attend for model in (known, unknown)]
    assert attends == [modules.attend, causal_attention]


@pytest.mark.parametrize('dtype, device, compiled, wanted', [
    ('auto', 'cpu', False, True), ('bfloat16', 'cpu', False, True),
    ('float32', 'cpu', False, False), ('float16', 'cpu', False, False),
    ('auto', 'cpu', True, False), ('auto', 'cuda', False, False)])
def test_who_uses_it_and_where_auto_is_bfloat16(monkeypatch, dtype, device, compiled, wanted):
    device = torch.device(device)
    assert loading.wanted(dtype, compiled, device) == wanted
    if dtype == 'auto' and device.type == 'cpu':
        for multiplied in (False, True):
            monkeypatch.setattr(loading, 'multiplies_bfloat16', lambda found=multiplied: found)
            chosen = loading.training_dtype(dtype, compiled, device)
            assert chosen == DTYPES[wanted and multiplied]


def test_without_a_compiler_training_is_torchs_with_one_note(monkeypatch, capsys):
    loading.library.cache_clear()
    monkeypatch.setenv('CXX', 'no-such-compiler')
    try:
        assert not any(loading.wanted('auto', False, torch.device('cpu')) for _ in range(2))
        assert capsys.readouterr().err.count('Note: no C++ extension') == 1
    finally:
        loading.library.cache_clear()
