"""Attention over an entire sequence, as in training, using one of the backends."""
import torch
import torch.nn.functional as F

from attention.local import blockwise_local_attention, with_sink_key, with_sink_score
from attention.masks import dense_mask


def causal_attention(q, k, v, window: int = 0, dropout_p: float = 0.0, backend: str = 'auto',
                     sink=None):
    """Causal self-attention; `window` > 0 limits each query to its last `window` keys.

    Args:
        q: (B, H, T, D). k, v: (B, Hkv, T, D), H a multiple of Hkv.
        window: number of keys that a query sees, including its own; 0 = all up to its own. Or a
            function, as in `attention.masks.in_window`: then all scores are computed.
        backend: one of `attention.kernels.choose.BACKENDS`.
        sink: (H,), a logit per head in the denominator of the softmax (gpt-oss, 2025): weight
            that goes to no key. None = no sink.
    Returns (B, H, T, D).
    Raises UserError if the backend does not support these arguments.
    """
    if callable(window):
        return math_attention(q, k, v, window, dropout_p, sink)
    window = window if window < q.size(2) else 0
    if backend not in ('sdpa', 'math') and (backend != 'auto' or q.is_cuda):
        from attention.kernels.dispatch import attend_faster
        y = attend_faster(q, k, v, window, dropout_p, backend, sink is not None)
        if y is not None:
            return y
    if backend == 'math':
        return math_attention(q, k, v, window, dropout_p, sink)
    if window:
        return blockwise_local_attention(q, k, v, window, dropout_p, sink)
    return sdpa(q, k, v, dropout_p, sink)


def sdpa(q, k, v, dropout_p: float = 0.0, sink=None) -> torch.Tensor:
    """Causal attention without a window, using torch's scaled_dot_product_attention."""
    if sink is not None:  # with a first query too, since is_causal aligns queries and keys there
        q, k, v, scale = with_sink_score(q, k, v, sink)
        q, (k, v) = F.pad(q, (0, 0, 1, 0)), with_sink_key(k, v)
        k, v = expand_heads(k, q.size(1)), expand_heads(v, q.size(1))
        y = F.scaled_dot_product_attention(q, k, v, None, dropout_p, True, scale=scale)
        return y[:, :, 1:, :-1]
    gqa = q.size(1) != k.size(1)
    if gqa and q.device.type == 'cpu':  # on CPU, SDPA copies K and V for every query head
        k, v, gqa = expand_heads(k, q.size(1)), expand_heads(v, q.size(1)), False
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, dropout_p=dropout_p, enable_gqa=gqa)


def expand_heads(x: torch.Tensor, n_head: int) -> torch.Tensor:
    """K or V (B, Hkv, S, D) -> (B, H, S, D), repeated for the query heads; a view if Hkv is 1."""
    B, n_kv_head, S, D = x.shape
    return x[:, :, None].expand(B, n_kv_head, n_head // n_kv_head, S, D).flatten(1, 2)


def math_attention(q, k, v, window: int = 0, dropout_p: float = 0.0, sink=None) -> torch.Tensor:
    """Reference implementation: softmax over all scores in at least float32, O(T * T) memory."""
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        k, v = (expand_heads(x.to(wide), q.size(1)) for x in (k, v))
        scores = q.to(wide) @ k.transpose(2, 3) * q.size(-1) ** -0.5
        seen = dense_mask(q.size(2), k.size(2), window, q.device)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sink is not None:
            logits = sink.to(wide).view(-1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, logits], dim=-1)
        weights = scores.softmax(-1)[..., :k.size(2)]
        return (F.dropout(weights, dropout_p, training=dropout_p > 0) @ v).to(q.dtype)
