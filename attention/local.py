"""Sliding-window attention in O(T * W) on any device: exact, in blocks, using torch's SDPA."""
import torch
import torch.nn.functional as F

from attention.masks import dense_mask

MIN_BLOCK = 32  # smaller blocks have more overhead than they save by skipping keys


def blockwise_local_attention(q, k, v, window: int, dropout_p: float = 0.0) -> torch.Tensor:
    """Exact sliding-window attention: each block of queries attends to the span of keys it can see.

        keys      . . | . . | . . | . . | . .      window = 4, blocks of 2 queries
        block 3         [     span      ]          the same mask in every block after the first

    Args:
        q: (B, H, t, D). k, v: (B, Hkv, S, D), S >= t. The last t keys are at the positions of the
            queries; the S - t keys before them (a ring's contents) directly precede them, in
            order. The first query sees at most window - 1 of those.
        window: number of keys that a query sees, including its own; >= 1, whatever t is.
        dropout_p: dropout on the attention weights.
    Returns:
        (B, H, t, D).
    """
    t, prefix = q.size(2), k.size(2) - q.size(2)
    block = _block_size(window, q.size(1) // k.size(1))
    lookback = -(-(window - 1) // block) * block  # window - 1 keys, rounded up to complete blocks
    n_first = min(max(lookback, block), t)  # may have fewer than `lookback` keys before them
    q_first, q_rest = q.split([n_first, t - n_first], dim=2)
    k_first, v_first = k[:, :, :prefix + n_first], v[:, :, :prefix + n_first]
    first = masked_attention(q_first, k_first, v_first, window, dropout_p)
    if t <= n_first:
        return first
    start = prefix + n_first - lookback
    rest = _attend_blocks(q_rest, k[:, :, start:], v[:, :, start:], window, block, dropout_p)
    return torch.cat([first, rest], dim=2)


def _block_size(window: int, group: int) -> int:
    """Number of queries per block. A span is window + block keys, so small blocks waste fewer
    scores; but the gradients of K and V are first computed per span, which takes window / block
    times their size, shared by the `group` query heads of a K/V head."""
    return max(MIN_BLOCK, window // (group + 1))


def masked_attention(q, k, v, window: int, dropout_p: float = 0.0) -> torch.Tensor:
    """Attention of queries at the end of the keys, using one dense mask.

    q (B, H, t, D), k and v (B, Hkv, S, D) -> (B, H, t, D).
    """
    group, t, S = q.size(1) // k.size(1), q.size(2), k.size(2)
    if group == 1 and t == S <= window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p)
    mask = dense_mask(t, S, window, q.device).repeat(group, 1)               # (H/Hkv * t, S)
    rows = q.reshape(q.size(0), k.size(1), -1, q.size(3))              # (B, Hkv, H/Hkv * t, D)
    y = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, dropout_p=dropout_p)
    return y.reshape(q.shape)


def _attend_blocks(q, k, v, window, block, dropout_p):
    """Attention of blocks of queries that all have `lookback` keys before them.

    q (B, H, t, D), k and v (B, Hkv, lookback + t, D) -> (B, H, t, D). The batch of the SDPA call is
    B * Hkv and its heads are the blocks, so that spans of K and V are overlapping views.
    """
    B, H, t, D = q.shape
    n_kv_head, lookback = k.size(1), k.size(2) - t
    group, n = H // n_kv_head, -(-t // block)  # n blocks, the last one padded
    padding = n * block - t
    if padding:
        q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
    q = q.reshape(B * n_kv_head, group, n, block, D).transpose(1, 2)
    k, v = (x.reshape(B * n_kv_head, -1, D).unfold(1, lookback + block, block).transpose(2, 3)
            for x in (k, v))                                                 # (B*Hkv, n, span, D)
    mask = dense_mask(block, lookback + block, window, q.device).repeat(group, 1)
    # padded queries see at least their own key, so there is no NaN; they are cut off
    y = F.scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=mask, dropout_p=dropout_p)
    y = y.view(B * n_kv_head, n, group, block, D).transpose(1, 2).reshape(B, H, n * block, D)
    return y[:, :, :t]
