"""QK-norm and RoPE with a shared custom backward pass, which saves only the input and one number
per head vector; the plain torch equivalent is `attention.rope.norm_and_rotate`."""
import torch
from torch.autograd.function import once_differentiable


class NormAndRotate(torch.autograd.Function):
    """y = rotate(z * w), z = x * r, r = 1 / sqrt(mean(x^2) + eps).

    Autograd would save x, z and z * w.
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
        u = rotate(grad.to(cos.dtype), cos, -sin).to(dtype)  # back: the gradient of z * w
        z = x.to(dtype) * r
        uz = u * z
        mean = (uz @ weight.to(dtype)).div_(x.size(-1))[..., None]
        grad_x = u.mul_(weight).addcmul_(z, mean, value=-1).mul_(r)
        return grad_x.to(x.dtype), uz.sum((0, 1, 2)).to(weight.dtype), None, None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Like `apply_rope`, but in the tables' dtype, without a rolled copy and without autograd. With
    -sin it is the inverse, and also the gradient."""
    half, y = x.size(-1) // 2, x * cos
    y[..., :half].addcmul_(x[..., half:], sin[..., :half])
    y[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return y
