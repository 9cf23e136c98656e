"""The loss of a language model without its logits: (tokens, vocabulary) of them, several times over, take more memory than
anything else in a step of a small GPT.

Tokens are taken a chunk at a time: logits, loss and gradients of the chunk, and the logits are gone before the next (as in
Liger Kernel's FusedLinearCrossEntropy, Hsu et al. 2024, and `torch.nn.functional.linear_cross_entropy` of torch 2.13). Nothing
is computed twice: the gradients are made in the forward pass, and only scaled in the backward pass.
"""
import torch
import torch.nn.functional as F

from model import cross_entropy

# Bytes of float32 logits held at a time.
CHUNK_BYTES = {'cpu': 32 * 2 ** 20, 'cuda': 128 * 2 ** 20}
MOST_COMPILED = 8  # chunks; a compiled graph has each of them


def rows_at_a_time(vocab_size: int, device: str) -> int:
    """Tokens whose logits are held at a time on this type of device; a loss over more of them is in chunks."""
    return max(1, CHUNK_BYTES.get(device, CHUNK_BYTES['cpu']) // (4 * vocab_size))


def linear_cross_entropy(x, weight, targets, ignore_index: int = -1) -> torch.Tensor:
    """Mean cross-entropy of the logits `x @ weight.T`, in float32 whatever autocast says of the product.

    Args:
        x: (N, C). weight: (V, C). targets: (N,) int64; those that are `ignore_index` do not count (NaN where none do).
    Raises:
        RuntimeError: in a second backward pass over it.
    """
    device = x.device.type
    rows = rows_at_a_time(weight.size(0), device)
    if torch.compiler.is_compiling():
        rows = max(rows, -(-x.size(0) // MOST_COMPILED))
    if x.size(0) <= rows:
        return cross_entropy(F.linear(x, weight), targets, ignore_index)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    with torch.autocast(device, enabled=False):
        return _Chunked.apply(x, weight, targets, ignore_index, rows, dtype, torch.is_grad_enabled())


class _Chunked(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, weight, targets, ignore_index, rows, dtype, differentiated):
        w, counted = weight.to(dtype), targets != ignore_index
        n, counted, targets = counted.sum(), counted[:, None], targets.where(counted, 0)[:, None]
        # in float32 also where the products are not: chunks are added up
        full = torch.promote_types(weight.dtype, torch.float32)
        total = x.new_zeros((), dtype=full)
        if differentiated:
            grad_x, grad_w = torch.empty_like(x, dtype=full), torch.zeros_like(weight, dtype=full)
        for first in range(0, x.size(0), rows):
            chunk = slice(first, first + rows)
            xc = x[chunk].to(dtype)
            logits = F.linear(xc, w).to(full)                                      # (rows, V)
            most, hit = logits.amax(1, keepdim=True), logits.gather(1, targets[chunk])
            p = logits.sub_(most).exp_()  # in place from here on: the chunk's logits are the only (rows, V) there is
            norm, counts = p.sum(1, keepdim=True), counted[chunk].to(full)
            # `where`: no shape that depends on data
            total += (most + norm.log() - hit).where(counted[chunk], 0).sum()
            if differentiated:  # d loss / d logits, but for 1 / n: float16 would lose most of it below its smallest number
                d = p.mul_(counts / norm).scatter_add_(1, targets[chunk], -counts).to(dtype)
                grad_x[chunk] = (d @ w).to(full)
                if dtype == full:
                    grad_w.addmm_(d.t(), xc)
                else:
                    grad_w += d.t() @ xc
                del d
            del logits, p  # not to be there beside those of the next chunk
        if differentiated:
            ctx.save_for_backward(grad_x.div_(n).to(x.dtype), grad_w.div_(n).to(weight.dtype))
        return total / n

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * grad, grad_w * grad, None, None, None, None, None
