"""The loss of a language model without materializing all logits, which need more memory than
anything else in a training step of a small GPT.

Logits, loss and gradients are computed one chunk of tokens at a time (as in Liger Kernel's
FusedLinearCrossEntropy, Hsu et al. 2024). The backward pass only scales the gradients.
"""
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model import cross_entropy

# bytes of float32 logits in memory at a time
CHUNK_BYTES = {'cpu': 32 * 2 ** 20, 'cuda': 128 * 2 ** 20}
HALF_ROWS = 4  # times as many tokens per chunk if logits stay in half precision
WORDS = 4096  # of the vocabulary, whose gradients a CPU computes at a time in half precision
MOST_COMPILED = 8  # chunks in a compiled model, whose graph contains all of them


def rows_at_a_time(vocab_size: int, device: str) -> int:
    """Return the tokens per chunk on this type of device; a loss over more tokens is chunked."""
    return max(1, CHUNK_BYTES.get(device, CHUNK_BYTES['cpu']) // (4 * vocab_size))


def softmax_gradients(logits, targets, ignore_index: int, differentiated: bool):
    """Return the sum of the losses of logits (rows, V), which may be overwritten, and its gradient
    (rows, V), or None if that is not wanted, both in at least float32. targets: (rows,)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = (targets != ignore_index)[:, None]
    targets = targets[:, None].where(counted, 0)
    most, hit = logits.amax(1, keepdim=True), logits.gather(1, targets)
    p = logits.sub_(most).exp_()
    norm, counts = p.sum(1, keepdim=True), counted.to(p.dtype)
    # `where` instead of indexing: shapes do not depend on data
    total = (most + norm.log() - hit).where(counted, 0).sum()
    if not differentiated:
        return total, None
    return total, p.mul_(counts / norm).scatter_add_(1, targets, -counts)


def linear_cross_entropy(x, weight, targets, ignore_index: int = -1,
                         gradients=softmax_gradients, add=torch.Tensor.add_) -> torch.Tensor:
    """Return the mean cross-entropy of the logits `x @ weight.T`, in float32 even under autocast.
    Backpropagating it a second time raises a RuntimeError.

    x: (N, C). weight: (V, C). targets: (N,) int64, without those equal to `ignore_index` (NaN if
    all are). gradients: a faster `softmax_gradients`, then used for any number of tokens, and in
    half precision for more at a time. add: a faster addition in place of half to full precision.
    """
    device = x.device.type
    rows = rows_at_a_time(weight.size(0), device)
    if torch.compiler.is_compiling():
        rows = max(rows, -(-x.size(0) // MOST_COMPILED))
    if x.size(0) <= rows and gradients is softmax_gradients:
        return cross_entropy(F.linear(x, weight), targets, ignore_index)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    if gradients is not softmax_gradients and dtype != torch.float32:
        # the weights are read once for each chunk, which takes a share of the time of its matmuls
        n_chunks = -(-x.size(0) // (HALF_ROWS * rows))
        rows = -(-x.size(0) // n_chunks)
    with torch.autocast(device, enabled=False):
        return _Chunked.apply(x, weight, targets, ignore_index, rows, dtype,
                              torch.is_grad_enabled(), gradients, add)


class _Chunked(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, weight, targets, ignore_index, rows, dtype, differentiated, gradients, add):
        w, n = weight.to(dtype), (targets != ignore_index).sum()
        # at least float32 whatever the matmuls use, because chunks are accumulated
        full = torch.promote_types(weight.dtype, torch.float32)
        total = x.new_zeros((), dtype=full)
        # on a CPU, products that fit into its cache
        words = WORDS if x.is_cpu and not torch.compiler.is_compiling() else len(w)
        if differentiated:
            grad_x, grad_w = torch.empty_like(x, dtype=full), torch.zeros_like(weight, dtype=full)
        # the same memory for all chunks, because the system clears new memory
        in_place = gradients is not softmax_gradients and not torch.compiler.is_compiling()
        memory = x.new_empty(min(rows, len(x)), len(w), dtype=dtype) if in_place else None
        for first in range(0, x.size(0), rows):
            chunk = slice(first, first + rows)
            xc = x[chunk].to(dtype)
            if in_place:
                torch.mm(xc, w.t(), out=memory[:len(xc)])
            # of logits (rows, V), which become their gradients in place
            loss, d = gradients(memory[:len(xc)] if in_place else F.linear(xc, w), targets[chunk],
                                ignore_index, differentiated)
            total += loss
            if differentiated:
                d = d.to(dtype)  # without the factor 1 / n, which would underflow in float16
                grad_x[chunk] = (d @ w).to(full)
                if dtype == full:
                    grad_w.addmm_(d.t(), xc)
                else:
                    for word in range(0, len(w), words):
                        add(grad_w[word:word + words], d[:, word:word + words].t() @ xc)
            del d  # free it before the next chunk
        if differentiated:
            ctx.save_for_backward(grad_x.div_(n).to(x.dtype), grad_w.div_(n).to(weight.dtype))
        return total / n

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        grad_x, grad_w = ctx.saved_tensors
        return grad_x.mul_(grad), grad_w.mul_(grad), *[None] * 7


def distillation(x, weight, targets, teacher, teacher_weight, ignore_index: int = -1):
    """Return the mean divergence (Kullback-Leibler) of the predictions of the logits `x @ weight.T`
    from a teacher's, `teacher @ teacher_weight.T` (Hinton et al. 2015). The backward pass computes
    the logits of each chunk again.

    x: (N, C). weight: (V, C). targets: (N,), of which only those equal to `ignore_index` matter:
    they do not count. teacher: (N, D). teacher_weight: (V, D).
    """
    device, counted = x.device.type, targets != ignore_index
    rows = rows_at_a_time(weight.size(0), device)
    if torch.compiler.is_compiling():
        rows = max(rows, -(-x.size(0) // MOST_COMPILED))
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    with torch.autocast(device, enabled=False):  # it would add the chunks' gradients in `dtype`
        total = sum(checkpoint(_divergence, *chunk, weight, teacher_weight, dtype,
                               use_reentrant=False, preserve_rng_state=False)
                    for chunk in zip(x.split(rows), teacher.split(rows), counted.split(rows)))
    return total / counted.sum()


def _divergence(x, teacher, counted, weight, teacher_weight, dtype):
    full = torch.promote_types(dtype, torch.float32)
    ours, theirs = (F.linear(*(part.to(dtype) for part in pair)).to(full).log_softmax(-1)
                    for pair in ((x, weight), (teacher, teacher_weight)))
    each = F.kl_div(ours, theirs, log_target=True, reduction='none').sum(-1)
    return each.where(counted, 0).sum()
