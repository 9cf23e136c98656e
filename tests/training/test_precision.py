"""Float32 under autocast: norms, softmax, loss, residual stream, gradients, optimizer state."""
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import model as model_module
from attention import causal_attention
from attention.rope import apply_rope
from model import GPT, GPTConfig
from tests.helpers.models import FULL_STACK, tokens

HALF = pytest.mark.parametrize('half', [torch.bfloat16, torch.float16], ids=['bf16', 'fp16'])


def autocast(half):
    return torch.autocast('cpu', half)


def rounding(half):
    """Largest relative error of one rounding."""
    return torch.finfo(half).eps / 2


def observed(model):
    """List that receives (module, input, output) of each norm and block in later forward passes."""
    seen = []
    for module in model.modules():
        if 'Norm' in type(module).__name__ or type(module).__name__ == 'Block':
            module.register_forward_hook(lambda m, given, out: seen.append((m, given[0], out)))
    return seen


def normed(module, x):
    """The norm by its definition, in float64."""
    x = x.detach().double()
    if isinstance(module, nn.RMSNorm):
        mean = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + module.eps) * module.weight.double()
    centred = x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) * module.weight.double()
    return y if module.bias is None else y + module.bias.double()


@HALF
def test_norms_residual_stream_and_gradients_are_in_float32_and_matmuls_in_half(half):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**FULL_STACK | dict(bias=True))).train()
    for name, p in model.named_parameters():
        if p.dim() == 1:
            nn.init.normal_(p, mean=float(name.endswith('weight')), std=0.3)
    seen, idx, dtypes = observed(model), tokens(2, 40), set()
    for block in model.transformer.h:
        block.attn.register_forward_hook(
            lambda m, given, out: dtypes.update(x.dtype for x in (out[0], *out[1])))
        block.mlp.c_fc.register_forward_hook(lambda m, given, out: dtypes.add(out.dtype))
    with autocast(half):
        logits, loss = model(idx, idx)
    loss.backward()
    assert dtypes == {half} == {logits.dtype}
    assert {loss.dtype, *(p.grad.dtype for p in model.parameters())} == {torch.float32}
    assert len(seen) >= 3 * 7 + 1
    for module, x, out in seen:
        if type(module).__name__ == 'Block':
            assert x.dtype == out[0].dtype == torch.float32
        else:
            assert x.dtype == out.dtype == torch.float32
            torch.testing.assert_close(out.detach().double(), normed(module, x), rtol=1e-5,
                                       atol=1e-6)


@HALF
def test_queries_and_keys_are_normed_and_turned_in_float32(half, monkeypatch):
    """Differs from float64 only by rounding to the half type before and after RoPE."""
    seen, plain = [], model_module.norm_and_rotate

    def spy(x, norm, rope):
        seen.append((x.detach(), norm, rope, plain(x, norm, rope)))
        return seen[-1][-1]
    monkeypatch.setattr(model_module, 'norm_and_rotate', spy)
    torch.manual_seed(0)
    model = GPT(GPTConfig(**FULL_STACK)).train()
    with autocast(half):
        model(tokens(2, 40), tokens(2, 40))
    assert len(seen) > 7
    for x, norm, rope, y in seen:
        assert x.dtype == y.dtype == half and norm.weight.dtype == torch.float32
        wanted = apply_rope(normed(norm, x), *(table.double() for table in rope))
        size = wanted.abs().amax(-1, keepdim=True)
        assert ((y.detach().double() - wanted).abs() <= 4 * rounding(half) * size).all()


@HALF
@pytest.mark.parametrize('window, n_kv_head', [(0, 1), (50, 2)])
@pytest.mark.parametrize('dropout_p', [0.0, 1e-12])
def test_the_softmax_of_attention(half, window, n_kv_head, dropout_p):
    """Scores near 60 would be rounded by up to 0.25 in bfloat16. The dropout drops nothing."""
    torch.manual_seed(1)
    T, D = 200, 16
    q, k, v = (torch.randn(1, n, T, D) for n in (2, n_kv_head, n_kv_head))
    q, k = 42 * F.normalize(q, dim=-1), 6 * F.normalize(k, dim=-1)
    q, k, v = q.to(half), k.to(half), v.to(half)
    with autocast(half):
        y = causal_attention(q, k, v, window, dropout_p=dropout_p)
    wide = [x.double().repeat_interleave(2 // x.size(1), 1) for x in (q, k, v)]
    scores = wide[0] @ wide[1].transpose(2, 3) / math.sqrt(D)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    scores = scores.masked_fill((distance < 0) | (distance >= (window or T)), -torch.inf)
    assert 40 < scores.max() < 70
    exact = scores.softmax(-1) @ wide[2]
    assert y.dtype == half
    # the weights may be rounded once for the matmul with the values, and the sum once
    assert (y.double() - exact).abs().max() < 2 * rounding(half) * v.double().abs().max()
    rough = scores.to(half).double().softmax(-1) @ wide[2]  # the bound above must exclude it
    assert (rough - exact).abs().max() > 4 * rounding(half) * v.double().abs().max()
