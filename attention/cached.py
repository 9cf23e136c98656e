"""Attention of new tokens over stored K and V: chunked prefill, and decode one token at a time.

Stored K and V that are not in the compute dtype are converted one tile at a time, and the tiles'
softmaxes are merged using their maxima and sums, as in FlashAttention and flash-decoding
(Dao et al. 2022, 2023): a decoded copy of the entire cache never exists. (A chunk that attends only
to itself or, in a local layer, to a window before it is short and is converted all at once.)

Shapes: q (B, H, t, D); k, v (B, Hkv, S, D); if quantized, k_scale, v_scale (B, Hkv, S, 1), too.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F

from attention.backends import HALF, sdpa_of_any_shape, triton_usable
from attention.causal import causal_attention
from attention.local import blockwise_local_attention
from attention.masks import in_window

# Elements of K (and of V) converted at a time: 1 MB of float32, which fits in a core's L2 cache.
TILE = 2 ** 18
# Elements of the scores that a chunk computes at a time, 2 MB of float32, but at least those of
# FEWEST queries. All scores of a long prompt's last chunk would take many times that, and the
# allocator keeps such buffers: the process would grow each time that a prompt is the longest yet.
SCORES, FEWEST = 2 ** 19, 16


def cached_attention(q, k, v, k_scale=None, v_scale=None, *, kv_lens=None, window: int = 0,
                     sink=None):
    """Attention of t new queries over stored keys, which include those of the new tokens.

    Args:
        q: (B, H, t, D).
        k, v: (B, Hkv, S, D) as stored, with scales if quantized (int4: D/2 bytes).
        kv_lens: (B,) int64, number of valid keys per row; keys from index kv_lens[b] on are
            ignored. None = all S. If t > 1, keys are in order and the last t valid ones are the
            queries' own; if t = 1, the order does not matter.
        window: number of keys that a query sees, including its own; 0 = all up to its own.
            Ignored if t = 1: the caller passes only keys in the window. Or a function, as in
            `attention.masks.in_window`, whatever t is, for keys in order.
        sink: (H,), a logit per head in the denominator of the softmax, or None.
    Returns (B, H, t, D); undefined for rows without keys.
    """
    t, S, stored = q.size(2), k.size(2), (k, v, k_scale, v_scale)
    masked = callable(window)
    if kv_lens is None and S == t:  # nothing precedes the chunk: plain causal attention
        # (not FlexAttention, which would compile a kernel for each prompt length)
        k, v = dequantized(q.dtype, *stored)
        with sdpa_of_any_shape(q.device):
            return causal_attention(q, k, v, window, backend='sdpa', sink=sink)
    if not masked and kernel_takes(q, k, sink):
        from attention.kernels.decode import stored_attention
        return stored_attention(q, *stored, kv_lens=kv_lens, window=window)
    if t > 1 and kv_lens is None and window and not masked:
        k, v = dequantized(q.dtype, *stored)
        with sdpa_of_any_shape(q.device):
            return blockwise_local_attention(q, k, v, window, sink=sink)
    if t == 1 and not masked:
        window = 0
    # scores of quantized keys exist one tile at a time; fewer queries would decode the keys oftener
    n_keys = S if k.dtype == q.dtype else min(S, max(1, TILE // (k.size(1) * q.size(3))))
    most = max(FEWEST, SCORES // (q.size(0) * q.size(1) * n_keys))
    if t > most:
        pieces = []
        for start in range(0, t, most):
            end = min(start + most, t)
            n, lens = S - t + end, None if kv_lens is None else kv_lens - t + end
            keys = [None if x is None else x[:, :, :n] for x in stored]
            pieces.append(_attend_chunk(q[:, :, start:end], *keys, lens, window, sink))
        return torch.cat(pieces, 2)
    return _attend_chunk(q, *stored, kv_lens, window, sink)


def _attend_chunk(q, k, v, k_scale, v_scale, kv_lens, window, sink):
    """`cached_attention` with all scores at once."""
    t, S, stored = q.size(2), k.size(2), (k, v, k_scale, v_scale)
    mask = None
    if t > 1 or kv_lens is not None or window:
        mask = _mask(t, S, kv_lens, window, q.device)
        if t > 1:  # for the t queries of each head of a group
            mask = mask.repeat(1, 1, q.size(1) // k.size(1), 1)
    # fold the query heads of one K/V head into one matrix, so that K and V are never expanded
    folded = q.reshape(q.size(0), k.size(1), -1, q.size(3))           # (B, Hkv, H/Hkv * t, D)
    if sink is not None or k.dtype != q.dtype or (q.dtype in HALF and mask is not None):
        y = _attend_tiles(folded, *stored, mask, sink)
    else:
        y = _attend(folded, k, v, mask)
    return y.reshape(q.shape)


def kernel_takes(q, k, sink=None) -> bool:
    """Whether the Triton kernel takes these (wider ones do not fit in shared memory)."""
    odd = k.dtype == torch.int8 and q.size(-1) % 2
    fits = q.size(-1) <= 256 and not odd and not {torch.float64, torch.uint8} & {q.dtype, k.dtype}
    return fits and sink is None and triton_usable(q.device)


def _mask(t, S, kv_lens, window, device):
    """(B or 1, 1, t, S) bool, True = visible."""
    k_pos = torch.arange(S, device=device)
    if t == 1 and not window:
        return (k_pos < kv_lens[:, None])[:, None, None]
    first = S - t if kv_lens is None else (kv_lens - t)[:, None, None, None]
    q_pos = torch.arange(t, device=device)[:, None] + first
    return in_window(q_pos, k_pos, window).view(-1, 1, t, S)


def _attend(q, k, v, mask):
    """Attention over K and V as stored, read once for all query heads. q (B, Hkv, R, D) -> same."""
    scale, shape = q.size(-1) ** -0.5, q.shape
    if q.dtype in HALF:  # SDPA keeps the scores in float32, which a GEMM would round
        with sdpa_of_any_shape(q.device):
            return F.scaled_dot_product_attention(q, k, v)
    if mask is None:  # two matmuls and a softmax: call overhead matters in decoding
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))                # (B * Hkv, R or S, D)
        scores = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=scale)
        return torch.bmm(scores.softmax(-1), v).view(shape)
    scores = (q * scale) @ k.transpose(2, 3)                          # (B, Hkv, R, S)
    # finite, so that a row without keys gives an unused value instead of NaN
    scores = scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ v


def _attend_tiles(q, k, v, k_scale, v_scale, mask, sink=None):
    """Attention over K and V, converted one tile at a time. q (B, Hkv, R, D) -> same."""
    dtype = scores_dtype(q.dtype)
    scaled, parts, out = q.to(dtype) * q.size(-1) ** -0.5, [], []
    if sink is not None:  # (H,) -> (Hkv, R, 1)
        n_rows = q.size(1) * q.size(2)
        sink = sink.to(dtype).repeat_interleave(n_rows // len(sink)).view(*q.shape[1:3], 1)
    for batch, keys in tiles((*k.shape[:3], q.size(-1))):
        tile = [None if x is None else x[batch, :, keys] for x in (k, v, k_scale, v_scale)]
        scores = tile_scores(scaled[batch], tile[0], tile[2])         # (b, Hkv, R, s)
        if mask is not None:
            m = (mask[batch] if mask.size(0) > 1 else mask)[..., keys]
            scores = scores.masked_fill(~m, torch.finfo(dtype).min)
        parts.append(PartialSoftmax.of(scores, tile[1], tile[3]))
        if keys.stop == k.size(2):
            out.append(join_parts(parts, sink))
            parts = []
    return torch.cat(out).to(q.dtype)


def tiles(shape, size: int = TILE):
    """Yield two slices (rows, keys) for each tile of stored K of `shape` (B, Hkv, S, D): complete
    rows if they fit in `size` elements, otherwise parts of one row."""
    B, n_kv_head, S, D = shape
    n_keys = min(S, max(1, size // (n_kv_head * D)))
    n_rows = max(1, size // (n_kv_head * D * S)) if n_keys == S else 1
    for row in range(0, B, n_rows):
        for key in range(0, S, n_keys):
            yield slice(row, min(row + n_rows, B)), slice(key, min(key + n_keys, S))


def scores_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of scores and weights: at least float32, as a half-precision GEMM would round them."""
    return torch.promote_types(dtype, torch.float32)


def tile_scores(q, k, k_scale):
    """q (b, Hkv, R, D), already scaled, times keys (b, Hkv, s, D): (b, Hkv, R, s). The scales of
    keys multiply the scores: cheaper than multiplying the keys in decoding, where R < D."""
    scores = q @ unpacked(k, q.dtype).transpose(2, 3)
    return scores if k_scale is None else scores.mul_(k_scale.to(q.dtype).transpose(2, 3))


class PartialSoftmax(NamedTuple):
    """Attention of R queries over some of their keys: the sum of the values weighted by
    exp(score - top), and what is needed to merge it with other parts (online softmax, Milakov &
    Gimelshein 2018). top, total: (b, Hkv, R, 1); values: (b, Hkv, R, D)."""
    top: torch.Tensor
    total: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, scores, v, v_scale=None) -> 'PartialSoftmax':
        """scores (b, Hkv, R, s) are overwritten; the scales of values multiply the weights."""
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        if v_scale is not None:
            weights.mul_(v_scale.to(weights.dtype).transpose(2, 3))
        return cls(top, total, weights @ unpacked(v, weights.dtype))


def join_parts(parts: list[PartialSoftmax], sink=None) -> torch.Tensor:
    """Merge the parts into attention over all their keys, (b, Hkv, R, D). sink: of each row."""
    top, total, values = parts[0]
    for part in parts[1:]:
        new_top = torch.maximum(top, part.top)
        a, b = (top - new_top).exp_(), (part.top - new_top).exp_()
        top, total = new_top, total * a + part.total * b
        values = values * a + part.values * b
    return values / (total if sink is None else total + (sink - top).exp())


def unpacked(x, dtype: torch.dtype) -> torch.Tensor:
    """Stored K or V in `dtype`, without its scales: (..., D), also from int4's (..., D / 2)."""
    if x.dtype == torch.uint8:
        x = torch.cat([x & 15, x >> 4], dim=-1).to(torch.int8) - 8
    return x.to(dtype)


def dequantize(values, scale, dtype: torch.dtype) -> torch.Tensor:
    """Quantized values times scales (..., 1), in `dtype`; computed in at least float32."""
    wide = scores_dtype(dtype)
    return (unpacked(values, wide) * scale.to(wide)).to(dtype)


def dequantized(dtype, k, v, k_scale=None, v_scale=None):
    """Stored K and V in `dtype`; copied only if stored in a different dtype."""
    if k_scale is None:
        return k.to(dtype), v.to(dtype)
    return dequantize(k, k_scale, dtype), dequantize(v, v_scale, dtype)
