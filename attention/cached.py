"""Attention of a few new tokens over what a cache holds: prefill in chunks, and decode one token at a time."""
import torch
import torch.nn.functional as F

from attention.causal import causal_attention
from attention.heads import fold_heads, unfold_heads
from attention.local import blockwise_local_attention, masked_attention
from attention.masks import in_window


def cached_attention(q, k, v, window: int = 0, q_pos=None, k_pos=None) -> torch.Tensor:
    """Attention of t new queries over S keys, the new tokens' own among them.

    Args:
        q: (B, H, t, D). k, v: (B, Hkv, S, D).
        window: 0 (global) or the sliding window.
        q_pos, k_pos: None when every row holds equally many tokens; the keys are then in order and the last t are the
            queries' own, except at t = 1, where any order will do and every key given is seen. For rows of different
            lengths (B, t) and (B, S): the position of each query and key, negative for a key that is not there.
    Returns:
        (B, H, t, D).
    """
    if k_pos is not None:
        mask = in_window(q_pos[:, :, None], k_pos[:, None, :], window) & (k_pos >= 0)[:, None, :]  # (B, t, S)
        return _folded_attention(q, k, v, mask)
    if q.size(2) > 1:
        return _chunk_attention(q, k, v, window)
    return _folded_attention(q, k, v, None)


def _chunk_attention(q, k, v, window):
    if window:
        return blockwise_local_attention(q, k, v, window)
    if q.size(2) == k.size(2):
        return causal_attention(q, k, v)
    return masked_attention(q, k, v, window=0)


def _folded_attention(q, k, v, mask):
    """The query heads of one KV head as rows of one matrix: reads K and V once, whatever the number of heads."""
    n_kv_head = k.size(1)
    rows = fold_heads(q, n_kv_head)                                        # (B, Hkv, H/Hkv * t, D)
    if q.dtype in (torch.bfloat16, torch.float16):
        if mask is None:  # SDPA keeps the scores in float32, which a half-precision GEMM would round
            return unfold_heads(F.scaled_dot_product_attention(rows, k, v), q.size(1))
        rows, k = rows.float(), k.float()
    scores = (rows * q.size(-1) ** -0.5) @ k.transpose(2, 3)               # (B, Hkv, H/Hkv * t, S)
    if mask is not None:
        group = q.size(1) // n_kv_head
        mask = mask[:, None].repeat(1, 1, group, 1)                        # (B, 1, H/Hkv * t, S)
        # finite, so that a padded query, which sees nothing, gives garbage that is never read instead of NaN
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return unfold_heads(scores.softmax(-1).to(v.dtype) @ v, q.size(1))
