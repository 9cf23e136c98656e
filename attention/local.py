"""Sliding-window attention in O(T * W) on any device: exact, in blocks, using torch's SDPA."""
import torch
import torch.nn.functional as F

from attention.masks import dense_mask

MIN_BLOCK = 32  # smaller blocks have more overhead than they save by skipping keys


def blockwise_local_attention(q, k, v, window: int, dropout_p: float = 0.0,
                              sink=None) -> torch.Tensor:
    """Exact sliding-window attention: each block of queries attends to the span of keys it can see.

        keys      . . | . . | . . | . . | . .      window = 4, blocks of 2 queries
        block 3         [     span      ]          the same mask in every block after the first

    Args:
        q: (B, H, t, D). k, v: (B, Hkv, S, D), S >= t. The last t keys are at the positions of the
            queries; the S - t keys before them (a ring's contents) directly precede them, in
            order. The first query sees at most window - 1 of those.
        window: number of keys that a query sees, including its own; >= 1, whatever t is.
        dropout_p: dropout on the attention weights.
        sink: (H,), a logit per head in the denominator of the softmax, or None.
    Returns (B, H, t, D).
    """
    t, prefix, D, scale = q.size(2), k.size(2) - q.size(2), q.size(3), None
    if sink is not None:
        q, k, v, scale = with_sink_score(q, k, v, sink)
    block = _block_size(window, q.size(1) // k.size(1))
    lookback = -(-(window - 1) // block) * block  # window - 1 keys, rounded up to complete blocks
    n_first = min(max(lookback, block), t)  # may have fewer than `lookback` keys before them
    q_first, q_rest = q.split([n_first, t - n_first], dim=2)
    k_first, v_first = k[:, :, :prefix + n_first], v[:, :, :prefix + n_first]
    first = masked_attention(q_first, k_first, v_first, window, dropout_p, scale)[..., :D]
    if t <= n_first:
        return first
    start = prefix + n_first - lookback
    rest = _attend_blocks(q_rest, k[:, :, start:], v[:, :, start:], window, block, dropout_p, scale)
    return torch.cat([first, rest[..., :D]], dim=2)


def _block_size(window: int, group: int) -> int:
    """Number of queries per block. A span is window + block keys, so small blocks waste fewer
    scores; but the gradients of K and V are first computed per span, which takes window / block
    times their size, shared by the `group` query heads of a K/V head."""
    return max(MIN_BLOCK, window // (group + 1))


def with_sink_score(q, k, v, sink):
    """q, k, v with another dimension, in which only a sink key (`with_sink_key`) is not 0 and each
    query has its head's logit; and the scale of the scores."""
    scale = q.size(-1) ** -0.5
    logits = (sink.to(q.dtype) / scale).view(-1, 1, 1).expand(*q.shape[:3], 1)
    return torch.cat([q, logits], dim=-1), F.pad(k, (0, 1)), F.pad(v, (0, 1)), scale


def with_sink_key(k, v):
    """Put the sink key before the others: 1 in the last dimension, otherwise 0; its value is 0."""
    sink_key = torch.zeros_like(k[..., :1, :])
    sink_key[..., -1] = 1
    return torch.cat([sink_key, k], dim=-2), F.pad(v, (0, 0, 1, 0))


def masked_attention(q, k, v, window: int, dropout_p: float = 0.0, scale=None) -> torch.Tensor:
    """Attention of queries at the end of the keys, using one dense mask.

    q (B, H, t, D), k and v (B, Hkv, S, D) -> (B, H, t, D). scale: of the scores with a sink.
    """
    group, t, S = q.size(1) // k.size(1), q.size(2), k.size(2)
    if group == 1 and t == S <= window and not scale:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p)
    mask = dense_mask(t, S, window, q.device).repeat(group, 1)               # (H/Hkv * t, S)
    rows = q.reshape(q.size(0), k.size(1), -1, q.size(3))              # (B, Hkv, H/Hkv * t, D)
    return _sdpa(rows, k, v, mask, dropout_p, scale).reshape(q.shape)


def _sdpa(q, k, v, mask, dropout_p, scale):
    if scale:
        (k, v), mask = with_sink_key(k, v), F.pad(mask, (1, 0), value=True)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale)


def _attend_blocks(q, k, v, window, block, dropout_p, scale):
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
    y = _sdpa(q.flatten(2, 3), k, v, mask, dropout_p, scale)
    y = y.view(B * n_kv_head, n, group, block, D).transpose(1, 2).reshape(B, H, n * block, D)
    return y[:, :, :t]
