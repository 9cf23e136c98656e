"""What a training step does beside its matmuls, in C++ on a CPU (train.cpp): attention, QK-norm
with RoPE, GELU and cross-entropy, forward and backward. Tensors are float32 or bfloat16; all
arithmetic is float32.

They are torch operators (`torch.ops.nanokv`), so that recomputation sees attention and memory is
predicted from tensors without data. Every function here does the same in plain torch if it is
given anything else.
"""
import ctypes
import functools
import weakref
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from attention import causal_attention
from attention.rope import norm_and_rotate
from common.gpt_config import unknown_field
import extension
from training import loss
from training.device import multiplies_bfloat16, pick_dtype

SOURCE = Path(__file__).with_name('train.cpp')
WIDEST = 1024  # head_dim


class Heads(ctypes.Structure):
    _fields_ = [('data', ctypes.c_void_p),
                *((name, ctypes.c_int64) for name in ('b', 'h', 't', 'half'))]


class Attention(ctypes.Structure):
    _fields_ = [*((name, Heads) for name in 'q k v y dy dq dk dv'.split()),
                *((name, ctypes.c_void_p) for name in ('lse', 'sink', 'dsink', 'sums')),
                *((name, ctypes.c_int64) for name in 'B H Hkv T D parts threads window'.split()),
                ('seed', ctypes.c_uint64), ('dropout', ctypes.c_float)]


class Norm(ctypes.Structure):
    _fields_ = [*((name, Heads) for name in 'x y dy dx'.split()),
                *((name, ctypes.c_void_p) for name in 'gain cos sin dgain'.split()),
                *((name, ctypes.c_int64) for name in 'B H T D threads'.split()),
                ('eps', ctypes.c_float)]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The extension, compiled if necessary; None, after a note, if that is not possible."""
    return extension.opened(SOURCE, _checked)


def _checked(found):
    found.nanokv_train_sizes.restype = ctypes.c_int64
    for k, struct in enumerate((Attention, Norm)):
        if found.nanokv_train_sizes(ctypes.c_int64(k)) != ctypes.sizeof(struct):
            raise extension.Unavailable(f'{struct.__name__} has a different size in the extension')
    return found


def wanted(s, device: torch.device) -> bool:
    """Whether a run with settings `s` uses the extension: on a CPU with dtype='auto' or 'bfloat16',
    unless it is compiled. dtype='float32' is torch's own arithmetic, whose losses are the same to
    the last bit whatever this version of the extension computes."""
    return (s.dtype in ('auto', 'bfloat16') and device.type == 'cpu' and not s.compile
            and library() is not None)


def training_dtype(s, device: torch.device) -> torch.dtype:
    """Like `pick_dtype` of s.dtype, but where a run uses the extension, 'auto' is bfloat16 on
    processors that have instructions for it. (torch's own attention in bfloat16 is slower than in
    float32: its backward pass does not use them.)"""
    if s.dtype == 'auto' and wanted(s, device) and multiplies_bfloat16():
        return torch.bfloat16
    return pick_dtype(s.dtype, device)


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


def _heads(x) -> Heads:
    return Heads(x.data_ptr(), *x.stride()[:3], x.dtype == torch.bfloat16)


def _pointer(x):
    return None if x is None else x.data_ptr()


def _contiguous_rows(x):
    return x if x.stride(-1) == 1 else x.contiguous()


def _like(x):
    """An empty tensor of the shape of x (B, H, T, D) whose memory is (B, T, H, D), the layout of a
    Linear layer's output."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


# -- operators -------------------------------------------------------------------------------------

operators = torch.library.Library('nanokv', 'DEF')


def operator(schema: str, empty):
    """Register a function for CPU tensors, whose first argument is the result, which it fills.
    empty: makes the result from the arguments; for tensors without data that is all."""
    def register(fill):
        def filled(*args):
            result = empty(*args)
            fill(result, *args)
            return result
        name = schema.partition('(')[0]
        operators.define(schema)
        operators.impl(name, filled, 'CPU')
        torch.library.register_fake(f'nanokv::{name}', empty, lib=operators)
        return getattr(torch.ops.nanokv, name)
    return register


def _parts(k) -> int:
    """Units of work for each K/V head, so that all threads have some."""
    B, n_kv_head, T, _ = k.shape
    return min(-(-torch.get_num_threads() // (B * n_kv_head)), -(-T // 32))


def _attention(q, k, v, sink, seed, window, dropout, lse, **heads) -> Attention:
    B, H, T, D = q.shape
    return Attention(**{name: _heads(x) for name, x in dict(q=q, k=k, v=v, **heads).items()},
                     lse=lse.data_ptr(), sink=_pointer(sink), B=B, H=H, Hkv=k.size(1), T=T, D=D,
                     parts=_parts(k), threads=torch.get_num_threads(),
                     window=min(window or T, T), dropout=dropout,
                     seed=0 if seed is None else int(seed))


@operator('attention(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? seed, int window, '
          'float dropout) -> (Tensor, Tensor)',
          lambda q, *_: (_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)))
def attention(result, q, k, v, sink, seed, window, dropout):
    """Causal attention in a window (0 = none): y (B, H, T, D), and the logarithm of each softmax's
    denominator (B, H, T). sink: (H,), or None. seed: a number, with dropout."""
    y, lse = result
    call = _attention(q, k, v, sink, seed, window, dropout, lse, y=y)
    library().nanokv_attention(ctypes.byref(call))


@operator('attention_backward(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? seed, Tensor y, '
          'Tensor lse, Tensor dy, int window, float dropout) -> (Tensor, Tensor, Tensor, Tensor)',
          lambda q, k, v, sink, seed, y, lse, *_: (
              _like(q), _like(k), _like(v), torch.empty_like(lse[0, :, 0])))
def attention_backward(result, q, k, v, sink, seed, y, lse, dy, window, dropout):
    """The gradients of q, k, v, and of sink (0 without one)."""
    dq, dk, dv, dsink = result
    rows, width = (-(-n // 16) * 16 for n in k.shape[2:])
    sums = k.new_empty(k.size(0) * k.size(1) * _parts(k), 2, rows + 16, width, dtype=torch.float32)
    dsink.zero_()
    call = _attention(q, k, v, sink, seed, window, dropout, lse, y=y, dy=dy, dq=dq, dk=dk, dv=dv)
    call.sums, call.dsink = sums.data_ptr(), None if sink is None else dsink.data_ptr()
    library().nanokv_attention_backward(ctypes.byref(call))


@operator('gelu(Tensor x, Tensor? dy, bool tanh) -> Tensor',
          lambda x, dy, tanh: torch.empty_like(x))
def gelu(y, x, dy, tanh):
    """GELU of x; with dy, the gradient of x."""
    _call('gelu', x, dy, y, x.numel(), tanh, x.dtype == torch.bfloat16)


def _call(name, *arguments):
    """Call a function of the extension whose arguments are tensors (or None) and integers."""
    as_c = [ctypes.c_int64(x) if isinstance(x, int) else ctypes.c_void_p(_pointer(x))
            for x in (torch.get_num_threads(), *arguments)]
    getattr(library(), f'nanokv_{name}')(*as_c)


def _norm(x, gain, cos, sin, eps, **heads) -> Norm:
    B, H, T, D = x.shape
    return Norm(**{name: _heads(t) for name, t in dict(x=x, **heads).items()}, eps=eps,
                gain=gain.data_ptr(), cos=_pointer(cos), sin=_pointer(sin), B=B, H=H, T=T, D=D,
                threads=torch.get_num_threads())


@operator('norm(Tensor x, Tensor gain, Tensor? cos, Tensor? sin, float eps) -> Tensor',
          lambda x, gain, cos, sin, eps: _like(x))
def norm(y, x, gain, cos, sin, eps):
    """QK-norm of x (B, H, T, D), then RoPE with tables (T, D) or None."""
    library().nanokv_norm(ctypes.byref(_norm(x, gain, cos, sin, eps, y=y)))


@operator('norm_backward(Tensor dy, Tensor x, Tensor gain, Tensor? cos, Tensor? sin, float eps) '
          '-> (Tensor, Tensor)',
          lambda dy, x, gain, cos, sin, eps: (_like(x), torch.empty_like(gain)))
def norm_backward(result, dy, x, gain, cos, sin, eps):
    """The gradients of x and gain."""
    dx, dgain = result
    call = _norm(x, gain, cos, sin, eps, dy=dy, dx=dx)
    call.dgain = dgain.data_ptr()
    library().nanokv_norm_backward(ctypes.byref(call))


@operator('cross_entropy(Tensor(a!) logits, Tensor targets, int ignored) -> Tensor',
          lambda logits, targets, ignored: logits.new_empty(len(logits), dtype=torch.float32))
def cross_entropy(losses, logits, targets, ignored):
    """The loss of each row of logits (rows, V), which become the gradients of their sum."""
    rows, n = logits.shape
    low, high = map(int, targets.where(targets != ignored, 0).aminmax())
    if low < 0 or high >= n:
        raise IndexError(f'targets from {low} to {high}: there are logits of 0 to {n - 1}')
    _call('cross_entropy', logits, targets.long().contiguous(), losses, rows, n, ignored,
          logits.dtype == torch.bfloat16)


@operator('add(Tensor(a!) total, Tensor part) -> ()', lambda total, part: None)
def add(_, total, part):
    """Add part (bfloat16) to total (float32) in place."""
    _call('add', total, part, part.numel())


# -- with gradients --------------------------------------------------------------------------------

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
        y, lse = torch.ops.nanokv.attention(q, k, v, sink, seed, window, dropout)
        ctx.save_for_backward(q, k, v, sink, seed, y, lse)
        ctx.how = window, dropout
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        dq, dk, dv, dsink = torch.ops.nanokv.attention_backward(
            *ctx.saved_tensors, _contiguous_rows(dy), *ctx.how)
        return dq, dk, dv, dsink if ctx.needs_input_grad[3] else None, None, None


def softmax_gradients(logits, targets, ignore_index: int, differentiated: bool):
    """Like `training.loss.softmax_gradients`."""
    if not _takes(logits) or not logits.is_contiguous():
        return loss.softmax_gradients(logits, targets, ignore_index, differentiated)
    return torch.ops.nanokv.cross_entropy(logits, targets, ignore_index).sum(), logits


def linear_cross_entropy(embedding, x, weight, targets):
    """Like `training.loss.linear_cross_entropy`, with the weight of an `Embedding`."""
    this = embedding.latest and embedding.latest()
    if this and x.requires_grad and weight is embedding.weight:
        weight = _Kept.apply(weight, this)
    return loss.linear_cross_entropy(x, weight, targets, gradients=softmax_gradients,
                                     add=add_in_place)


class Embedding(nn.Embedding):
    """An embedding whose weight is the output layer's too. The loss's gradient is kept until the
    embedding's backward pass, which adds its own to the rows that it concerns, in place, without a
    tensor of all words for itself."""
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
        torch.ops.nanokv.add(total, part)
    else:
        total.add_(part)


class GELU(nn.GELU):
    """The same activation, of the extension."""

    def forward(self, x):
        return _Gelu.apply(x, self.approximate == 'tanh') if _takes(x) else super().forward(x)


class _Gelu(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, tanh):
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.tanh = tanh
        return torch.ops.nanokv.gelu(x, None, tanh)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, = ctx.saved_tensors
        return torch.ops.nanokv.gelu(x, dy.contiguous(), ctx.tanh), None


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
        return torch.ops.nanokv.norm(x, gain, cos, sin, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        dx, dgain = torch.ops.nanokv.norm_backward(
            _contiguous_rows(dy), *ctx.saved_tensors, ctx.eps)
        return dx, dgain, None, None, None
