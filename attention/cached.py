"""Attention of a few new tokens over what a cache holds: prefill in chunks, and decode one token at a time.

Stored K and V that are not in the compute dtype (int8) are decoded a tile at a time and the tiles joined by their
log-sum-exp, as FlashAttention and flash-decoding do (Dao et al. 2022, 2023): no decoded copy of what is held ever exists. (A
chunk that begins a text, or continues one in a local slot, is decoded at once, with at most a window before it.)
"""
import torch
import torch.nn.functional as F

from attention.causal import causal_attention
from attention.heads import fold_heads, unfold_heads
from attention.kernels import usable
from attention.local import blockwise_local_attention
from attention.masks import in_window
from attention.paged import paged_attention
from attention.softmax import PartialSoftmax, scores_dtype, tile_scores
from kv.view import KVView


def cached_attention(q, view: KVView, window: int = 0) -> torch.Tensor:
    """Attention of t new queries over what a cache holds, the new tokens' own K/V among it.

    Args:
        q: (B, H, t, D).
        view: from `KVCache.append` or `view`; K and V (B, Hkv, S, D) as they are stored.
        window: 0 (global) or the sliding window.
    Returns:
        (B, H, t, D).
    """
    if torch.is_autocast_enabled(q.device.type):  # the scores are at least float32 here, whatever it would make of them
        with torch.autocast(q.device.type, enabled=False):
            return cached_attention(q, view, window)
    if view.pages is not None:
        return paged_attention(q, view)
    t, S = q.size(2), view.k[0].size(2)
    in_order = view.k_pos is None and view.seen is None and t > 1
    if in_order and S == t:
        # exact blocks where there is a window: prompts have every length, for each of which FlexAttention would make a mask
        return causal_attention(q, *view.decoded(q.dtype), window, backend='sdpa')
    if suits_kernel(q, view):
        return kernel_attention(q, view, window)
    if view.table is not None:
        view = view.gathered()
        S = view.k[0].size(2)
    if in_order and window:
        return blockwise_local_attention(q, *view.decoded(q.dtype), window)  # S <= window - 1 + t
    if view.k_pos is None and view.seen is None and t == 1:
        mask = None
    else:
        key = ('mask', window, t, S)
        if key not in view.memo:
            view.memo[key] = _mask(q, view, window)
        mask = view.memo[key]
    rows = fold_heads(q, view.k[0].size(1))                                 # (B, Hkv, H/Hkv * t, D)
    attend = _attend_stored if view.is_stored_as(q.dtype) else _attend_tiles
    return unfold_heads(attend(rows, view, mask), q.size(1))


def suits_kernel(q, view: KVView) -> bool:
    """Whether the Triton kernel serves: not for float64."""
    return usable(q.device) and torch.float64 not in (q.dtype, view.k[0].dtype)


def kernel_attention(q, view: KVView, window: int) -> torch.Tensor:
    from attention.kernels.decode import stored_attention  # where Triton is not installed, nobody gets here
    return stored_attention(q, view.k, view.v, seen=view.seen, table=view.table, q_pos=view.q_pos, k_pos=view.k_pos,
                            window=window)


def _mask(q, view, window) -> torch.Tensor:
    """(B or 1, 1, H/Hkv * t, S) bool, True = seen; one row stands for all query heads where t is 1."""
    t, S = q.size(2), view.k[0].size(2)
    if view.seen is not None:
        last = (view.seen[:, None] - t + torch.arange(t, device=q.device))[..., None]
        mask = torch.arange(S, device=q.device) <= last
    else:
        q_pos, k_pos = view.q_pos, view.k_pos
        if k_pos is None:
            q_pos, k_pos = (torch.arange(a, S, device=q.device)[None] for a in (S - t, 0))
        mask = in_window(q_pos[:, :, None], k_pos[:, None, :], window) & (k_pos >= 0)[:, None, :]
    group = q.size(1) // view.k[0].size(1)
    return mask[:, None] if t == 1 else mask[:, None].repeat(1, 1, group, 1)


def _attend_stored(rows, view, mask):
    """K and V as they lie: read once, whatever the number of query heads. rows (B, Hkv, R, D) -> the same shape."""
    k, v = view.k[0], view.v[0]
    if rows.dtype in (torch.bfloat16, torch.float16):
        if mask is None:  # SDPA keeps the scores in float32, which a half-precision GEMM would round
            return F.scaled_dot_product_attention(rows, k, v)
        return _attend_tiles(rows, view, mask)
    if mask is None:  # nothing but the two products: a decode step feels every call
        q, k, v = (x.flatten(0, 1) for x in (rows, k, v))                   # (B * Hkv, R or S, D)
        scores = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=rows.size(-1) ** -0.5)
        return torch.bmm(scores.softmax(-1), v).view_as(rows)
    scores = (rows * rows.size(-1) ** -0.5) @ k.transpose(2, 3)             # (B, Hkv, R, S)
    # finite, so that a padded query, which sees nothing, gives garbage that is never read instead of NaN
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ v


def _attend_tiles(rows, view, mask):
    """K and V decoded a tile at a time. rows (B, Hkv, R, D) -> the same shape."""
    output_dtype, dtype, S = rows.dtype, scores_dtype(rows.dtype), view.k[0].size(2)
    rows, out, partial = rows.to(dtype) * rows.size(-1) ** -0.5, [], None
    for tile in view.tiles():
        scores = tile_scores(rows[slice(*tile.rows)], tile, dtype)          # (b, Hkv, R, s)
        if mask is not None:
            m = mask[slice(*tile.rows)] if mask.size(0) > 1 else mask
            scores = scores.masked_fill(~m[..., slice(*tile.keys)], torch.finfo(dtype).min)
        partial = PartialSoftmax.of(scores, tile) if partial is None else partial.join(PartialSoftmax.of(scores, tile))
        if tile.keys[1] == S:
            out.append(partial.result())
            partial = None
    return torch.cat(out).to(output_dtype)
