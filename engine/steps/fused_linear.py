"""A Linear layer for the few rows of a decode step, with what surrounds it, as one kernel:
LayerNorm before it, and the bias, GELU and the residual after it.

    y = residual + gelu(layer_norm(x) W^T + b)         each part optional

Weights may be int8 (`engine.weights.quantized.Int8Linear`): then inputs are rounded to int8 as
well, with a scale per row, and sums are exact.

A step reads every weight once, and with few rows nothing else takes time: N * K numbers of W
against M * (K + N). At 3.35 TB/s, bfloat16, a 768 x 768 matrix takes 0.35 us and a 3,072 x 768 one
1.4 us, less than the launch of a kernel, so what matters is how few kernels there are (six a layer
in place of eleven), and that all of W is on its way at once.

Up to FEW rows (`_few_rows`) a program computes a few outputs from all columns at once. It asks for
its weights before it reads a row, so that they arrive while the row is normalized. For more rows
(`_linear`), W is the first operand of the tensor cores' product, whose 16 rows it fills, and SPLIT
warps each take a part of the columns: a program for 16 outputs has four warps with 128 columns each
in flight, while those of the next ones are copied.

Letters: M rows, K inputs, N outputs.
"""
import torch
import triton
import triton.language as tl

from attention.backends import INTERPRETING
from attention.kernels.decode import arithmetic
from engine.weights.linear import FewRowsLinear
from engine.weights.quantized import Int8Linear

MOST_ROWS, MOST_FLOAT_ROWS = 64, 16  # of int8; of floats: torch is faster with 32 (results/gpu)
# of `_few_rows`: rows, columns, and weights that a program holds in registers
FEW, MOST_COLUMNS, MOST_WEIGHTS = 8, 4096, 16384
# wanted, of `_few_rows`: an H100 or H200 has 132 multiprocessors, the interpreter one
PROGRAMS = 1 if INTERPRETING else 192
SPLIT = 4     # warps, one for each part of the columns
STAGES = 3
ACTIVATIONS = {'': 0, 'none': 1, 'tanh': 2, 'relu2': 3}  # `nn.GELU.approximate`; ReLU squared


@triton.jit
def _mean_and_rstd(X, m, of_m, K, eps, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """The mean of each row, and 1 / its standard deviation."""
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, K, BLOCK_K):
        some = of_m[:, None] & (first + k < K)[None, :]
        x = tl.load(X + m[:, None] * K + (first + k)[None, :], mask=some, other=0)
        total += tl.sum(x.to(tl.float32), 1)
    mean = total / K
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, K, BLOCK_K):
        some = of_m[:, None] & (first + k < K)[None, :]
        x = tl.load(X + m[:, None] * K + (first + k)[None, :], mask=some, other=0)
        x = tl.where(some, x.to(tl.float32) - mean[:, None], 0.0)
        squares += tl.sum(x * x, 1)
    return mean, tl.rsqrt(squares / K + tl.cast(eps, tl.float32))  # Inductor may pass float64


@triton.jit
def _inputs(X, GAIN, SHIFT, mean, rstd, k, m, K, M, NORM: tl.constexpr):
    """x at the columns k (SPLIT, BLOCK_K) of the rows m, normalized, in its dtype:
    (SPLIT, BLOCK_K, BLOCK_M)."""
    some = (k < K)[:, :, None] & (m < M)[None, None, :]
    x = tl.load(X + k[:, :, None] + m[None, None, :] * K, mask=some, other=0)
    if NORM:
        gain = tl.load(GAIN + k, mask=k < K, other=0).to(tl.float32)
        y = (x.to(tl.float32) - mean[None, None, :]) * rstd[None, None, :] * gain[:, :, None]
        if SHIFT is not None:
            y += tl.load(SHIFT + k, mask=k < K, other=0).to(tl.float32)[:, :, None]
        x = y.to(x.dtype)
    return x


@triton.jit
def _largest(X, GAIN, SHIFT, mean, rstd, of_part, m, K, M, BLOCK_M: tl.constexpr,
             BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, NORM: tl.constexpr):
    """The largest absolute input of each row; NaN if one is NaN."""
    largest, lost = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M,), tl.int32)
    for first in range(0, K, SPLIT * BLOCK_K):
        k = first + of_part + tl.arange(0, BLOCK_K)[None, :]
        x = tl.abs(_inputs(X, GAIN, SHIFT, mean, rstd, k, m, K, M, NORM).to(tl.float32))
        largest = tl.maximum(largest, tl.max(tl.max(x, 1), 0))
        lost += tl.sum(tl.sum((x != x).to(tl.int32), 1), 0)  # a maximum may ignore NaN
    return tl.where(lost > 0, float('nan'), largest)


@triton.jit
def _activated(y, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        y = 0.5 * y * (1 + tl.erf(y * 0.7071067811865476))
    elif ACTIVATION == 2:  # 1 + tanh(u) = 2 sigmoid(2 u)
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif ACTIVATION == 3:
        y = tl.where(y < 0, 0.0, y)  # a maximum would lose NaN
        y = y * y
    return y


@triton.jit(do_not_specialize=['M'])
def _linear(X, W, W_SCALE, BIAS, GAIN, SHIFT, RESIDUAL, Y, M, N, K, eps,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
            SPLIT: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr,
            DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """BLOCK_N outputs of all M rows. BLOCK_K: columns that each of SPLIT parts takes at a time."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m, of_part = tl.arange(0, BLOCK_M), tl.arange(0, SPLIT)[:, None] * BLOCK_K
    of_n, of_m = n < N, m < M
    mean, rstd = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    if NORM:
        mean, rstd = _mean_and_rstd(X, m, of_m, K, eps, BLOCK_M, SPLIT * BLOCK_K)
    INT8: tl.constexpr = W_SCALE is not None
    if INT8:
        largest = _largest(X, GAIN, SHIFT, mean, rstd, of_part, m, K, M, BLOCK_M, BLOCK_K, SPLIT,
                           NORM)
        most = tl.full((BLOCK_M,), 127.0, tl.float32)
        inverse = tl.where(largest > 0, tl.math.div_rn(most, largest), 0.0)
    acc = tl.zeros((SPLIT, BLOCK_N, BLOCK_M), tl.int32 if INT8 else tl.float32)
    for first in range(0, K, SPLIT * BLOCK_K):
        k = first + of_part + tl.arange(0, BLOCK_K)[None, :]                   # (SPLIT, BLOCK_K)
        w = tl.load(W + n.to(tl.int64)[None, :, None] * K + k[:, None, :],
                    mask=of_n[None, :, None] & (k < K)[:, None, :], other=0)
        x = _inputs(X, GAIN, SHIFT, mean, rstd, k, m, K, M, NORM)
        if INT8:  # to nearest, ties to even: 1.5 * 2**23 has no fraction bits
            x = (x.to(tl.float32) * inverse[None, None, :] + 12582912.0) - 12582912.0
            acc = tl.dot(w, x.to(tl.int8), acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(w.to(DTYPE), x.to(DTYPE), acc, input_precision=PRECISION)
    y = tl.sum(acc, 0).to(tl.float32)                                          # (BLOCK_N, BLOCK_M)
    if INT8:
        y *= (largest / 127.0)[None, :] * tl.load(W_SCALE + n, mask=of_n, other=0)[:, None]
    if BIAS is not None:
        y += tl.load(BIAS + n, mask=of_n, other=0).to(tl.float32)[:, None]
    y = _activated(y, ACTIVATION)
    at, some = m[None, :] * N + n[:, None], of_n[:, None] & of_m[None, :]
    if RESIDUAL is not None:
        y += tl.load(RESIDUAL + at, mask=some, other=0).to(tl.float32)
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=some)


@triton.jit(do_not_specialize=['M'])
def _few_rows(X, W, W_SCALE, BIAS, GAIN, SHIFT, RESIDUAL, Y, M, N, K, eps,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
              NORM: tl.constexpr, ACTIVATION: tl.constexpr):
    """BLOCK_N outputs of all M rows, from all K columns at once. Weights are multiplied by ordinary
    instructions: with so few rows they wait for memory all the same."""
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    of_n, of_k = n < N, k < K
    w = tl.load(W + n.to(tl.int64)[:, None] * K + k[None, :], mask=of_n[:, None] & of_k[None, :],
                other=0)
    gain = tl.load(GAIN + k, mask=of_k, other=0).to(tl.float32) if NORM else 0.0
    shift = tl.load(SHIFT + k, mask=of_k, other=0).to(tl.float32) if SHIFT is not None else 0.0
    bias = tl.load(BIAS + n, mask=of_n, other=0).to(tl.float32) if BIAS is not None else 0.0
    INT8: tl.constexpr = W_SCALE is not None
    w_scale = tl.load(W_SCALE + n, mask=of_n, other=0) / 127.0 if INT8 else 1.0
    for m in tl.static_range(BLOCK_M):
        some = of_k & (m < M)
        x = tl.load(X + m * K + k, mask=some, other=0)
        if NORM:
            off = tl.where(some, x.to(tl.float32) - tl.sum(x.to(tl.float32), 0) / K, 0.0)
            variance = tl.sum(off * off, 0) / K
            rstd = tl.rsqrt(variance + tl.cast(eps, tl.float32))  # Inductor may pass float64
            x = (off * rstd * gain + shift).to(x.dtype)
        wide = x.to(tl.float32)
        if INT8:
            size = tl.abs(wide)
            lost = tl.sum((wide != wide).to(tl.int32), 0) > 0  # a maximum may ignore NaN
            largest = tl.where(lost, float('nan'), tl.max(size, 0))
            most = tl.full((), 127.0, tl.float32)
            inverse = tl.where(largest > 0, tl.math.div_rn(most, largest), 0.0)
            whole = ((wide * inverse + 12582912.0) - 12582912.0).to(tl.int32)  # as in `_linear`
            y = tl.sum(w.to(tl.int32) * whole[None, :], 1).to(tl.float32) * largest * w_scale
        else:
            y = tl.sum(w.to(tl.float32) * wide[None, :], 1)
        y = _activated(y + bias, ACTIVATION)
        out = of_n & (m < M)
        if RESIDUAL is not None:
            y += tl.load(RESIDUAL + m * N + n, mask=out, other=0).to(tl.float32)
        tl.store(Y + m * N + n, y.to(Y.dtype.element_ty), mask=out)


def fused_linear(x, linear, norm=None, activation: str = '', residual=None) -> torch.Tensor:
    """residual + activation(linear(norm(x))); norm(x) and the result are rounded to x's dtype.

    Args:
        x: (M, K), contiguous, M at most MOST_ROWS. linear: `nn.Linear` of the same dtype, or
            `Int8Linear`.
        norm: `model.LayerNorm` over K, or None. activation: a key of ACTIVATIONS.
        residual: (M, N), contiguous, or None.
    Returns (M, N).
    """
    (M, K), N = x.shape, linear.out_features
    y = x.new_empty(M, N)
    dtype, precision = arithmetic(x.dtype, x.dtype)
    scale = linear.scale if isinstance(linear, Int8Linear) else None
    args = (x, linear.weight, scale, linear.bias, norm and norm.weight, norm and norm.bias,
            residual, y, M, N, K, 1e-5)
    how = dict(NORM=norm is not None, ACTIVATION=ACTIVATIONS[activation])
    if M <= FEW and K <= MOST_COLUMNS:
        block_k = triton.next_power_of_2(K)
        block_n = next(n for n in (8, 4, 2) if n == 2 or triton.cdiv(N, n) >= PROGRAMS
                       and n * block_k <= MOST_WEIGHTS)
        _few_rows[(triton.cdiv(N, block_n),)](
            *args, **how, BLOCK_M=triton.next_power_of_2(M), BLOCK_N=block_n, BLOCK_K=block_k,
            num_warps=max(1, min(8, block_n * block_k // 2048)))
        return y
    block_m = max(8, triton.next_power_of_2(M))
    block_n, block_k = (16, 128) if block_m <= 16 else (16, 64) if block_m == 32 else (32, 32)
    if precision and scale is None:  # without tensor cores
        block_n, block_k = 16, 32 if block_m <= 16 else 16
    _linear[(triton.cdiv(N, block_n),)](
        *args, **how, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, SPLIT=SPLIT, DTYPE=dtype,
        PRECISION=precision, num_warps=SPLIT, num_stages=STAGES)
    return y


def takes(x: torch.Tensor, *linears) -> bool:
    """Whether the kernel computes these layers for x (M, K): few rows, and layers in x's dtype or
    in int8 (not packed for the extension)."""
    def plain(linear):
        in_floats = type(linear) in (torch.nn.Linear, FewRowsLinear) and len(x) <= MOST_FLOAT_ROWS
        in_int8 = type(linear) is Int8Linear and not linear.packed
        return ((in_floats and linear.weight.dtype == x.dtype or in_int8)
                and linear.weight.is_contiguous())
    return len(x) <= MOST_ROWS and all(map(plain, linears))
