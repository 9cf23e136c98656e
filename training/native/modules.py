"""The operators with gradients, and the modules of a model that use them. Each function and module
here does the same in plain torch if it is given anything but float32 or bfloat16 on a CPU."""
import functools
import weakref

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from attention import causal_attention
from attention.rope import norm_and_rotate
from common.gpt_config import unknown_field
from training.native import operators
from training.step import loss

WIDEST = 1024  # head_dim


def speed_up(model) -> None:
    """Let a GPT train with the extension, in place. Call it once `loss_fn` is set. Attention
    stays torch's in a model with a setting that is not known here: it may change which keys a query
    sees."""
    known = not unknown_field(model.config, 'fast')
    for block in model.transformer.h:
        if block.attn.norm_and_rotate is norm_and_rotate:
            block.attn.norm_and_rotate = normed_and_rotated
        if known:
            block.attn.attend = attend
        if type(block.mlp.gelu) is nn.GELU:
            block.mlp.gelu.__class__ = GELU
    if model.loss_fn is loss.linear_cross_entropy:
        model.transformer.wte.__class__ = Embedding
        model.loss_fn = functools.partial(linear_cross_entropy, model.transformer.wte)


def _takes(*tensors) -> bool:
    """Whether these are tensors on a CPU, all float32 or all bfloat16."""
    kinds = {(x.dtype, x.device.type) for x in tensors if x is not None}
    return kinds in ({(torch.float32, 'cpu')}, {(torch.bfloat16, 'cpu')})


def _contiguous_rows(x):
    return x if x.stride(-1) == 1 else x.contiguous()


def attend(q, k, v, window: int = 0, dropout_p: float = 0.0, backend: str = 'auto', sink=None):
    """Like `attention.causal_attention`; backends other than 'auto' are torch's."""
    if (backend != 'auto' or not _takes(q, k, v) or q.size(-1) > WIDEST
            or sink is not None and not _takes(sink)):
        return causal_attention(q, k, v, window, dropout_p, backend, sink)
    sink = None if sink is None else sink.float()  # FSDP2 gathers bfloat16
    return _Attend.apply(q, k, v, sink, window, dropout_p)


class _Attend(torch.autograd.Function):

    @staticmethod
    def forward(ctx, q, k, v, sink, window, dropout):
        seed = torch.randint(2 ** 62, ()) if dropout else None
        q, k, v = map(_contiguous_rows, (q, k, v))
        y, lse = operators.attention(q, k, v, sink, seed, window, dropout)
        ctx.save_for_backward(q, k, v, sink, seed, y, lse)
        ctx.how = window, dropout
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        dq, dk, dv, dsink = operators.attention_backward(
            *ctx.saved_tensors, _contiguous_rows(dy), *ctx.how)
        return dq, dk, dv, dsink if ctx.needs_input_grad[3] else None, None, None


def softmax_gradients(logits, targets, ignore_index: int, differentiated: bool):
    """Like `training.step.loss.softmax_gradients`."""
    if not _takes(logits) or not logits.is_contiguous():
        return loss.softmax_gradients(logits, targets, ignore_index, differentiated)
    return operators.cross_entropy(logits, targets, ignore_index).sum(), logits


def linear_cross_entropy(embedding, x, weight, targets):
    """Like `training.step.loss.linear_cross_entropy`, with the weight of an `Embedding`."""
    this = embedding.latest and embedding.latest()
    if this and x.requires_grad and weight is embedding.weight:
        weight = _Kept.apply(weight, this)
    return loss.linear_cross_entropy(x, weight, targets, gradients=softmax_gradients,
                                     add=add_in_place)


class Embedding(nn.Embedding):
    """An embedding whose weight is the output layer's too. The loss's gradient is kept until the
    embedding's backward pass, which adds its own in place, to the rows that it concerns."""
    latest = None  # a weak reference to the last forward pass, which lives as long as its graph

    def forward(self, idx):
        this = Pass()
        self.latest = weakref.ref(this)
        return _Embed.apply(idx, self.weight, this)


class Pass:
    """A forward pass of an embedding. kept: the loss's gradient, between two backward passes."""
    kept = None


class _Kept(torch.autograd.Function):

    @staticmethod
    def forward(ctx, weight, this):
        ctx.this = this
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dweight):
        before = ctx.this.kept  # of another loss of the same pass
        ctx.this.kept = dweight if before is None else before + dweight
        return None, None


class _Embed(torch.autograd.Function):

    @staticmethod
    def forward(ctx, idx, weight, this):
        ctx.save_for_backward(idx)
        ctx.this, ctx.shape = this, weight.shape
        return F.embedding(idx, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        idx, = ctx.saved_tensors
        total, ctx.this.kept = ctx.this.kept, None
        total = dy.new_zeros(ctx.shape) if total is None else total
        total.index_add_(0, idx.flatten(), dy.flatten(0, -2).to(total.dtype))
        return None, total, None


def add_in_place(total, part):
    """Like `torch.Tensor.add_`, which converts all of `part` before it adds."""
    if (_takes(total) and _takes(part) and (total.dtype, part.dtype) == (torch.float32,
            torch.bfloat16) and total.is_contiguous() and part.is_contiguous()):
        operators.add(total, part)
    else:
        total.add_(part)


class GELU(nn.GELU):

    def forward(self, x):
        return _Gelu.apply(x, self.approximate == 'tanh') if _takes(x) else super().forward(x)


class _Gelu(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, tanh):
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.tanh = tanh
        return operators.gelu(x, None, tanh)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, = ctx.saved_tensors
        return operators.gelu(x, dy.contiguous(), ctx.tanh), None


def normed_and_rotated(x, qk_norm, rope=None):
    """Like `attention.rope.norm_and_rotate`."""
    cos, sin = rope or (None, None)
    if (qk_norm is None or not _takes(x) or x.size(-1) > WIDEST or not _takes(qk_norm.weight)
            or cos is not None and (cos.dim() != 2 or cos.dtype != torch.float32)):
        return norm_and_rotate(x, qk_norm, rope)
    return _Norm.apply(x, qk_norm.weight.float(), cos, sin, qk_norm.eps)


class _Norm(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, gain, cos, sin, eps):
        x = _contiguous_rows(x)
        ctx.save_for_backward(x, gain, cos, sin)
        ctx.eps = eps
        return operators.norm(x, gain, cos, sin, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        dx, dgain = operators.norm_backward(
            _contiguous_rows(dy), *ctx.saved_tensors, ctx.eps)
        return dx, dgain, None, None, None
