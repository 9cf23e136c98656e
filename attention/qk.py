"""Queries and keys before they meet: QK-norm (RMS norm over head_dim; Henry et al. 2020), RoPE."""
import torch

from attention.rope import apply_rope


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
        from attention.kernels.norm_rope import NormAndRotate  # the same, keeping less for backward
        return NormAndRotate.apply(x, norm.weight, norm.eps, *rope)
    y = norm(x.to(norm.weight.dtype)).to(x.dtype)
    return y if rope is None else apply_rope(y, *rope)
