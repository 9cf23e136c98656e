"""Attention z-loss: keeps attention scores small, so that they suit low precision.

    coefficient * mean over layers, heads and queries of logsumexp(scores) ** 2

is added to the gradient of the training loss, not to its value: the logged loss stays the
cross-entropy. Of router and output logits: ST-MoE (Zoph et al. 2022), PaLM (Chowdhery et al. 2022);
of attention: Character.AI's Kaiju (2025). The gradient enters in the backward pass of attention, as
that of Megatron's MoE losses does, so any kernel can compute attention itself, and recomputation
and DDP need to know nothing. The scores are computed there, all (B, H, T, T) of a layer at a time
in float32, whatever its window: O(T^2) memory. The forward pass keeps q and k for it.
"""
import functools

import torch

from attention import causal_attention
from attention.masks import dense_mask


def add_z_loss(model, coefficient: float) -> torch.Tensor:
    """Add the penalty to the gradients of the model's training steps.

    Returns a float32 scalar, 1 at first, that scales it. It must be set to what the loss is
    multiplied with before `backward` (gradient accumulation, loss scaling), in place.
    """
    loss_scale, share = torch.ones((), device=model.device), coefficient / model.config.n_layer
    for block in model.transformer.h:
        block.attn.attend = functools.partial(_attend, block.attn, share, loss_scale)
    return loss_scale


def _attend(attn, coefficient, loss_scale, q, k, v, window, dropout_p, backend, sink):
    y = causal_attention(q, k, v, window, dropout_p, backend, sink)
    if not (attn.training and torch.is_grad_enabled()):
        return y
    return WithPenalty.apply(y, q, k, sink, loss_scale, window, coefficient)


class WithPenalty(torch.autograd.Function):
    """Returns y; the gradients of q, k and sink get that of coefficient * loss_scale * mean
    logsumexp ** 2, where the sum includes the sink. Shapes as for `attention.causal_attention`."""

    @staticmethod
    def forward(ctx, y, q, k, sink, loss_scale, window, coefficient):
        ctx.save_for_backward(q, k, sink, loss_scale)
        ctx.window, ctx.coefficient = window, coefficient
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        q, k, sink, loss_scale = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        factor = loss_scale.to(wide) * (2 * ctx.coefficient / q[..., 0].numel())
        with torch.autocast(q.device.type, enabled=False):
            dq, dk, dsink = score_gradients(q, k, sink, ctx.window, factor)
        return grad, dq, dk, dsink, None, None, None


def score_gradients(q, k, sink, window: int, factor):
    """Gradients of q, k, sink (or None), if that of each score is factor * logsumexp * softmax."""
    wide, scale = factor.dtype, q.size(-1) ** -0.5
    queries = q.to(wide).unflatten(1, (k.size(1), -1)) * scale        # (B, Hkv, H/Hkv, T, D)
    keys, dsink = k.to(wide)[:, :, None], None
    scores = queries @ keys.transpose(-1, -2)                         # (B, Hkv, H/Hkv, T, T)
    scores.masked_fill_(~dense_mask(q.size(2), k.size(2), window, q.device), -torch.inf)
    total = scores.logsumexp(-1, keepdim=True)
    if sink is not None:
        logits = sink.to(wide).view(k.size(1), -1, 1, 1)
        total = torch.logaddexp(total, logits)
        dsink = (factor * total * (logits - total).exp()).sum((0, 3, 4)).flatten().to(sink.dtype)
    d = scores.sub_(total).exp_().mul_(factor * total)
    dq = (d @ keys * scale).flatten(1, 2)
    dk = (d.transpose(-1, -2) @ queries).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dsink
