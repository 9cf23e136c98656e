"""One kernel that turns a layer's projected q, k, v into its queries and stored K and V: QK-norm,
RoPE, int8 quantization and the write.

One program handles one head of one token, so that a decode step needs one launch per layer for
everything between the first matmul and attention. The plain torch equivalent:
`attention.rope.norm_and_rotate`, `kv.quantize.quantize_int8`, `engine.steps.static.put`.
"""
import torch
import triton
import triton.language as tl


@triton.jit
def _as_int8(x, scale):
    x = tl.math.div_rn(x, scale + tl.zeros_like(x))
    x = (x + 12582912.0) - 12582912.0  # to nearest, ties to even: 1.5 * 2**23 has no fraction bits
    return tl.minimum(tl.maximum(x, -127.0), 127.0).to(tl.int8)


@triton.jit
def _store(low, high, Y, SCALE, at_scale, stride, d, some, HALF: tl.constexpr,
           INT8: tl.constexpr):
    if INT8:
        top = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 0)
        scale = tl.maximum(tl.math.div_rn(top, 127.0), 5.9604644775390625e-08)
        scale = tl.minimum(scale, 65504.0).to(tl.float16)
        # a maximum may ignore NaN
        lost = tl.sum((low != low).to(tl.int32) + (high != high).to(tl.int32), 0) > 0
        tl.store(SCALE + at_scale, tl.where(lost, float('nan'), scale).to(tl.float16))
        low, high = _as_int8(low, scale.to(tl.float32)), _as_int8(high, scale.to(tl.float32))
    tl.store(Y + d * stride, low.to(Y.dtype.element_ty), mask=some)
    tl.store(Y + (HALF + d) * stride, high.to(Y.dtype.element_ty), mask=some)


@triton.jit
def _write(QKV, Q_GAIN, K_GAIN, COS, SIN, ROWS, PLACES, Q, K, V, K_SCALE, V_SCALE,
           T, n_head, n_kv_head, n_rows, eps, rope_b, kb, kh, ks, kd, vb, vh, vs, cb, ch, cs,
           HALF: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
           INT8: tl.constexpr, HAS_KV: tl.constexpr):
    """Head `head` of token `token`, as two halves: RoPE rotates element d together with d + D/2."""
    head, token = tl.program_id(0) % n_rows, (tl.program_id(0) // n_rows).to(tl.int64)
    b, j = token // T, token % T
    d = tl.arange(0, BLOCK)
    some = d < HALF
    dtype = QKV.dtype.element_ty
    x = QKV + (token * n_rows + head) * 2 * HALF + d
    low = tl.load(x, mask=some, other=0).to(tl.float32)
    high = tl.load(x + HALF, mask=some, other=0).to(tl.float32)
    if head < n_head + n_kv_head:  # V has neither norm nor RoPE
        if NORM:
            gain = Q_GAIN
            if HAS_KV and head >= n_head:
                gain = K_GAIN
            r = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * HALF)
                         + tl.cast(eps, tl.float32))  # Inductor of torch 2.11 passes float64
            low_gain = tl.load(gain + d, mask=some, other=0).to(tl.float32)
            high_gain = tl.load(gain + HALF + d, mask=some, other=0).to(tl.float32)
            low = (low * r * low_gain).to(dtype).to(tl.float32)
            high = (high * r * high_gain).to(dtype).to(tl.float32)
        if ROPE:
            at = b * rope_b + j * 2 * HALF + d
            cos = tl.load(COS + at, mask=some, other=0)
            sin = tl.load(SIN + at + HALF, mask=some, other=0)
            low, high = low * cos - high * sin, high * cos + low * sin
    low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    if head < n_head:
        y = Q + ((b * n_head + head) * T + j) * 2 * HALF + d
        tl.store(y, low.to(Q.dtype.element_ty), mask=some)
        tl.store(y + HALF, high.to(Q.dtype.element_ty), mask=some)
    elif HAS_KV:
        place = tl.load(PLACES + token).to(tl.int64)
        if place >= 0:
            row = tl.load(ROWS + token).to(tl.int64)
            h = (head - n_head) % n_kv_head
            of_scale = row * cb + h * ch + place * cs
            if head < n_head + n_kv_head:
                at_k = K + row * kb + h * kh + place * ks
                _store(low, high, at_k, K_SCALE, of_scale, kd, d, some, HALF, INT8)
            else:
                at_v = V + row * vb + h * vh + place * vs
                _store(low, high, at_v, V_SCALE, of_scale, 1, d, some, HALF, INT8)


def write_qkv(qkv, n_head: int, q_norm=None, k_norm=None, rope=None, stored=None, rows=None,
              places=None) -> torch.Tensor:
    """Return the queries of a layer, and write K and V of token j of row b to offset places[b, j]
    of row (or page) rows[b, j] of `stored`; a negative offset means that they are not written.

    Args:
        qkv: (B, t, H + 2 * Hkv, D), contiguous, D even, the heads of q | k | v; (B, t, H, D) for
            a layer that reads the K and V of another layer.
        q_norm, k_norm: `torch.nn.RMSNorm` over D, or None.
        rope: (cos, sin) from a `RotaryTable`, (t, D) or (B, 1, t, D); or None.
        stored: (k, v) or (k, v, k_scale, v_scale), (n, Hkv, S, D or 1); None in a reading layer.
        rows, places: (B, t) int64, contiguous.
    Returns (B, H, t, D), in the dtype of qkv.
    """
    B, t, n_rows, D = qkv.shape
    if q_norm is None and rope is None and stored is None:
        return qkv.transpose(1, 2)
    q = qkv.new_empty(B, n_head, t, D)
    # Missing tensors must be None. A placeholder such as q would look like a tensor that the kernel
    # writes twice: torch.compile turns each written argument into a separate tensor, and q would
    # be read from the wrong one.
    gains = [None if norm is None else norm.weight for norm in (q_norm, k_norm)]
    cos, sin = rope or (None, None)
    k, v, k_scale, v_scale = (*(stored or ()), None, None, None, None)[:4]
    int8 = k_scale is not None
    strides = (*k.stride(), *v.stride()[:3]) if stored else (0,) * 7
    strides += k_scale.stride()[:3] if int8 else (0,) * 3
    _write[(B * t * n_rows,)](
        qkv, *gains, cos, sin, rows, places, q, k, v, k_scale, v_scale,
        t, n_head, (n_rows - n_head) // 2, n_rows, 0.0 if q_norm is None else q_norm.eps,
        cos.stride(0) if rope and cos.dim() == 4 else 0, *strides,
        HALF=D // 2, BLOCK=triton.next_power_of_2(D // 2), NORM=q_norm is not None,
        ROPE=rope is not None, INT8=int8, HAS_KV=stored is not None, num_warps=1)
    return q
