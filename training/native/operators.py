"""The functions of the library as torch operators (`torch.ops.nanokv`), so that recomputation sees
attention, and memory is predicted from tensors without data."""
import ctypes

import torch

from training.native import loading
from training.native.loading import Attention, Heads, Norm

operators = torch.library.Library('nanokv', 'DEF')


def _heads(x) -> Heads:
    return Heads(x.data_ptr(), *x.stride()[:3], x.dtype == torch.bfloat16)


def _pointer(x):
    return None if x is None else x.data_ptr()


def _like(x):
    """An empty tensor of the shape of x (B, H, T, D) whose memory is (B, T, H, D), the layout of a
    Linear layer's output."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


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
    loading.library().nanokv_attention(ctypes.byref(call))


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
    loading.library().nanokv_attention_backward(ctypes.byref(call))


@operator('gelu(Tensor x, Tensor? dy, bool tanh) -> Tensor',
          lambda x, dy, tanh: torch.empty_like(x))
def gelu(y, x, dy, tanh):
    """GELU of x; with dy, the gradient of x."""
    _call('gelu', x, dy, y, x.numel(), tanh, x.dtype == torch.bfloat16)


def _call(name, *arguments):
    """Call a function of the extension whose arguments are tensors (or None) and integers."""
    as_c = [ctypes.c_int64(x) if isinstance(x, int) else ctypes.c_void_p(_pointer(x))
            for x in (torch.get_num_threads(), *arguments)]
    getattr(loading.library(), f'nanokv_{name}')(*as_c)


def _norm(x, gain, cos, sin, eps, **heads) -> Norm:
    B, H, T, D = x.shape
    return Norm(**{name: _heads(t) for name, t in dict(x=x, **heads).items()}, eps=eps,
                gain=gain.data_ptr(), cos=_pointer(cos), sin=_pointer(sin), B=B, H=H, T=T, D=D,
                threads=torch.get_num_threads())


@operator('norm(Tensor x, Tensor gain, Tensor? cos, Tensor? sin, float eps) -> Tensor',
          lambda x, gain, cos, sin, eps: _like(x))
def norm(y, x, gain, cos, sin, eps):
    """QK-norm of x (B, H, T, D), then RoPE with tables (T, D) or None."""
    loading.library().nanokv_norm(ctypes.byref(_norm(x, gain, cos, sin, eps, y=y)))


@operator('norm_backward(Tensor dy, Tensor x, Tensor gain, Tensor? cos, Tensor? sin, float eps) '
          '-> (Tensor, Tensor)',
          lambda dy, x, gain, cos, sin, eps: (_like(x), torch.empty_like(gain)))
def norm_backward(result, dy, x, gain, cos, sin, eps):
    """The gradients of x and gain."""
    dx, dgain = result
    call = _norm(x, gain, cos, sin, eps, dy=dy, dx=dx)
    call.dgain = dgain.data_ptr()
    loading.library().nanokv_norm_backward(ctypes.byref(call))


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
