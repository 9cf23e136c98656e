"""A decode step's queries and new key, from a layer's projected q, k, v: QK-norm, RoPE, rounding to
int8 and the write, as parts of the kernel of attention (`attention.kernels.decode`).

The plain torch equivalent: `attention.rope.norm_and_rotate`, `kv.quantize.quantize_int8`,
`engine.steps.static.put`.
"""
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class New(NamedTuple):
    """What a layer computes from its projected q, k, v in the kernel: QK-norm, RoPE, the rounding
    to int8, and the write of its K and V.

    q_norm, k_norm: `torch.nn.RMSNorm` over D, or None. rope: (cos, sin) from a `RotaryTable`,
    (1, D) or (B, 1, 1, D), or None. rows, places: (B,) int64, row (or page) of K and V for the
    token, and its offset in it; a negative offset: it is not written. None: of a layer that reads.
    ring: the new key may replace any, and is not the last one.
    """
    n_head: int
    q_norm: object = None
    k_norm: object = None
    rope: tuple | None = None
    rows: torch.Tensor | None = None
    places: torch.Tensor | None = None
    ring: bool = False


def arguments_of(new: New | None) -> tuple[list, float, int, dict]:
    """Those of the kernel: tensors, epsilon, the stride of RoPE's rows, and constants. Missing
    tensors are None: a placeholder such as q would look like a tensor that the kernel writes, and
    torch.compile turns each written argument into a separate tensor."""
    n_head, q_norm, k_norm, rope, rows, places, ring = new or New(0)
    cos, sin = rope or (None, None)
    gains = [None if norm is None else norm.weight for norm in (q_norm, k_norm)]
    flags = dict(NORM=q_norm is not None, ROPE=rope is not None, OWNS=rows is not None, RING=ring)
    return ([*gains, cos, sin, rows, places], 0.0 if q_norm is None else q_norm.eps,
            cos.stride(0) if rope and cos.dim() == 4 else 0, flags)


@triton.jit
def inverse_rms(X, some, eps, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """1 / RMS of the heads at X (rows, 1)."""
    d = tl.arange(0, BLOCK_D)[None, :]
    x = tl.load(X + d, mask=some & (d < D), other=0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) / D + tl.cast(eps, tl.float32))[:, None]


@triton.jit
def turned(X, GAIN, COS, SIN, rms, d, some, D: tl.constexpr, NORM: tl.constexpr,
           ROPE: tl.constexpr):
    """Numbers d (1, n) of the heads at X (rows, 1) after QK-norm and RoPE, as
    `attention.rope.norm_and_rotate` rounds them, in float32."""
    dtype = X.dtype.element_ty
    other = (d + D // 2) % D
    x = tl.load(X + d, mask=some, other=0).to(tl.float32)
    if NORM:
        x = (x * rms * tl.load(GAIN + d, mask=d < D, other=0).to(tl.float32)).to(dtype)
        x = x.to(tl.float32)
    if ROPE:
        y = tl.load(X + other, mask=some, other=0).to(tl.float32)
        if NORM:
            y = (y * rms * tl.load(GAIN + other, mask=d < D, other=0).to(tl.float32)).to(dtype)
            y = y.to(tl.float32)
        cos = tl.load(COS + d, mask=d < D, other=0)
        x = x * cos + y * tl.load(SIN + d, mask=d < D, other=0)  # SIN has the signs
    return x.to(dtype).to(tl.float32)


@triton.jit
def as_int8(even, odd):
    """Two halves of a head, as `kv.quantize.quantize_int8` rounds them, and their scale."""
    largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)))
    scale = tl.maximum(tl.math.div_rn(largest, 127.0), 5.9604644775390625e-08)
    scale = tl.minimum(scale, 65504.0).to(tl.float16)
    # a maximum may ignore NaN
    lost = tl.sum((even != even).to(tl.int32) + (odd != odd).to(tl.int32)) > 0
    scale = tl.where(lost, float('nan'), scale).to(tl.float16)
    return rounded(even, scale), rounded(odd, scale), scale


@triton.jit
def rounded(x, scale):
    x = tl.math.div_rn(x, scale.to(tl.float32) + tl.zeros_like(x))
    x = (x + 12582912.0) - 12582912.0  # to nearest, ties to even: 1.5 * 2**23 has no fraction bits
    return tl.minimum(tl.maximum(x, -127.0), 127.0)


@triton.jit
def queries(X, GAIN, COS, SIN, d, of_row, eps, D: tl.constexpr, BLOCK_D: tl.constexpr,
            NORM: tl.constexpr, ROPE: tl.constexpr, SCALES: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers d (1, n) of the heads at X (rows, 1), and numbers d + 1, if SCALES."""
    some = of_row[:, None] & (d < D)
    rms = inverse_rms(X, of_row[:, None], eps, D, BLOCK_D) if NORM else None
    even = turned(X, GAIN, COS, SIN, rms, d, some, D, NORM, ROPE).to(DTYPE)
    odd = even
    if SCALES:
        odd = turned(X, GAIN, COS, SIN, rms, d + 1, some, D, NORM, ROPE).to(DTYPE)
    return even, odd


@triton.jit
def write_new(X, to_v, K, kd, V, K_SCALE, V_SCALE, at_scale, GAIN, COS, SIN, d, writes, eps,
              D: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
              SCALES: tl.constexpr, DTYPE: tl.constexpr):
    """Write a key, from its head at X, to K, and its value, from X + to_v, to V. Returns numbers d
    (1, n), d + 1 and the scale of the key, and of the value, as they will be read."""
    x, some = X + tl.zeros((1, 1), tl.int32), d < D
    rms = inverse_rms(x, True, eps, D, BLOCK_D) if NORM else None
    k = turned(x, GAIN, COS, SIN, rms, d, some, D, NORM, ROPE)
    v = tl.load(x + to_v + d, mask=some, other=0).to(tl.float32)
    k_odd, v_odd = k, v
    if SCALES:
        k_odd = turned(x, GAIN, COS, SIN, rms, d + 1, some, D, NORM, ROPE)
        v_odd = tl.load(x + to_v + d + 1, mask=some, other=0).to(tl.float32)
    k, k_odd, k_scale = write_pair(K, K_SCALE, at_scale, k, k_odd, d, kd, some, writes, SCALES,
                                   DTYPE)
    v, v_odd, v_scale = write_pair(V, V_SCALE, at_scale, v, v_odd, d, 1, some, writes, SCALES,
                                   DTYPE)
    return k, k_odd, k_scale, v, v_odd, v_scale


@triton.jit
def write_pair(Y, SCALE, at_scale, even, odd, d, stride, some, writes, SCALES: tl.constexpr,
               DTYPE: tl.constexpr):
    """Write numbers d to Y; if SCALES also numbers d + 1, as int8. Returns what will be read there,
    and its scale."""
    scale = 1.0
    if SCALES:
        even, odd, half = as_int8(even, odd)
        scale = half.to(tl.float32)
        tl.store(SCALE + at_scale, half, mask=writes)
        tl.store(Y + (d + 1) * stride, odd.to(tl.int8), mask=some & writes)
    stored = even.to(Y.dtype.element_ty)
    tl.store(Y + d * stride, stored, mask=some & writes)
    return stored.to(DTYPE).to(tl.float32), odd, scale
