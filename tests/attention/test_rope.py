"""RoPE: half-split pairs rotated by pos * theta**(-2d/D), exact at any position and dtype; QK-norm
and RoPE with their own backward pass, against autograd of the plain formulas."""
import pytest
import torch

from attention.rope import RotaryTable, apply_rope, norm_and_rotate
from tests.helpers.reference import rms_norm, rotate

FAR = 100_000
D = 6


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed),
                       dtype=torch.float64).to(dtype)


@pytest.mark.parametrize('dtype, ulp, absolute', [
    (torch.float64, 0, 1e-9), (torch.float32, 0, 1e-6),
    (torch.bfloat16, 2 ** -8, 2e-6), (torch.float16, 2 ** -11, 2e-6)])
def test_far_positions_are_exact_and_half_precision_is_rotated_wide(dtype, ulp, absolute):
    x, table = random(1, 2, 3, 8, dtype=dtype), RotaryTable(8, 10000.0)
    wide = torch.promote_types(dtype, torch.float32)
    assert {part.dtype for part in table(0, 4, 'cpu', dtype)} == {wide}
    y = apply_rope(x, *table(FAR, FAR + 3, 'cpu', x.dtype))
    exact = rotate(x.double(), range(FAR, FAR + 3), 10000.0)
    assert y.dtype == dtype
    assert ((y.double() - exact).abs() <= ulp * exact.abs() + absolute).all()


def plain(x, norm, rope):
    """The plain formulas, differentiated by autograd."""
    x = x if norm is None else rms_norm(x, norm.weight)
    return x if rope is None else apply_rope(x, *rope)


@pytest.mark.parametrize('with_norm', [True, False])
@pytest.mark.parametrize('with_rope', [True, False])
@pytest.mark.parametrize('shape', [(2, 3, 5, D), (1, 1, 1, D), (1, 4, 7, D)])
def test_values_and_gradients(with_norm, with_rope, shape):
    x, upstream = random(*shape), random(*shape, seed=1)
    rope = RotaryTable(D, 100.0)(3, 3 + shape[2], 'cpu', torch.float64) if with_rope else None
    norm = torch.nn.RMSNorm(D, eps=1e-6, dtype=torch.float64) if with_norm else None
    if norm:  # with a negative gain, and one of 0
        norm.weight.data = torch.tensor([0.0, -1.3, 0.4, 1.0, 2.0, -0.1], dtype=torch.float64)
    found = []
    for apply in (norm_and_rotate, plain):
        leaf = x.clone().requires_grad_()
        y = apply(leaf, norm, rope)
        (y * 1).backward(upstream)
        found.append([y.detach(), leaf.grad])
        if norm:
            found[-1].append(norm.weight.grad)
            norm.weight.grad = None
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() < 1e-12
    with torch.no_grad():  # a different code path, as in sampling
        assert (norm_and_rotate(x, norm, rope) - found[0][0]).abs().max() < 1e-12


def test_half_precision_is_normed_in_float32_and_comes_back_as_it_was():
    """Under autocast activations are bfloat16 and gains float32."""
    x = random(1, 2, 5, 8, dtype=torch.bfloat16).requires_grad_()
    norm = torch.nn.RMSNorm(8, eps=1e-6)
    rope = RotaryTable(8, 100.0)(0, 5, 'cpu', torch.bfloat16)
    y = norm_and_rotate(x, norm, rope)
    y.backward(torch.randn_like(y))
    assert y.dtype == x.grad.dtype == torch.bfloat16 and norm.weight.grad.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(y, norm_and_rotate(x, norm, rope))  # every rounding at the same place


def test_only_the_input_is_kept_for_the_backward_pass():
    x, kept = torch.randn(1, 8, 64, 16, requires_grad=True), []
    rope = RotaryTable(16, 100.0)(0, 64, 'cpu', torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm_and_rotate(x, torch.nn.RMSNorm(16, eps=1e-6), rope)
    of_their_own = [t for t in kept if t.numel() >= x.numel() and t.data_ptr() != x.data_ptr()]
    assert not of_their_own and any(t.data_ptr() == x.data_ptr() for t in kept)
