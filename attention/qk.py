"""Queries and keys before they meet: QK-norm (RMS norm over head_dim; Henry et al. 2020) and RoPE.

In training both have one backward pass of their own, which keeps only the input and one number per
head vector.
"""
import torch
from torch.autograd.function import once_differentiable

from attention.rope import apply_rope, rotate, rotate_back


def norm_and_rotate(x: torch.Tensor, norm: torch.nn.RMSNorm | None, rope=None) -> torch.Tensor:
    """QK-norm of x's head vectors in the dtype of its gains (float32 under autocast), then RoPE; in
    x's dtype, so that K matches V.

    Args:
        x: (B, h, t, D). norm: over D, or None.
        rope: (cos, sin) from a `RotaryTable`, which broadcast to x, or None.
    Returns:
        (B, h, t, D).
    """
    if norm is None:
        return x if rope is None else apply_rope(x, *rope)
    if rope is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _NormAndRotate.apply(x, norm.weight, norm.eps, *rope)
    y = norm(x.to(norm.weight.dtype)).to(x.dtype)
    return y if rope is None else apply_rope(y, *rope)


class _NormAndRotate(torch.autograd.Function):
    """y = rotate(z * w), z = x * r, r = 1 / sqrt(mean(x^2) + eps).

    Autograd's own graph of it keeps x, z and z * w.
    """

    @staticmethod
    def forward(ctx, x, weight, eps, cos, sin):
        wide = x.to(torch.promote_types(weight.dtype, torch.float32))
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        r = squares.div_(x.size(-1)).add_(eps).rsqrt_()               # (B, h, t, 1)
        ctx.save_for_backward(x, weight, r, cos, sin)
        normed = (wide * r).mul_(weight).to(x.dtype)
        return rotate(normed.to(cos.dtype), cos, sin).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, r, cos, sin = ctx.saved_tensors
        dtype = torch.promote_types(weight.dtype, torch.float32)
        u = rotate_back(grad.to(cos.dtype), cos, sin).to(dtype)       # the gradient of z * w
        z = x.to(dtype) * r
        uz = u * z
        mean = (uz @ weight.to(dtype)).div_(x.size(-1))[..., None]
        grad_x = u.mul_(weight).addcmul_(z, mean, value=-1).mul_(r)
        return grad_x.to(x.dtype), uz.sum((0, 1, 2)).to(weight.dtype), None, None, None
