"""Attention over a whole sequence, as in training, by one of the backends of `attention.backends`."""
import torch
import torch.nn.functional as F

from attention.backends import choose, load_flash_attn
from attention.heads import expand_heads
from attention.local import blockwise_local_attention, flex_local_attention
from attention.masks import dense_mask


def causal_attention(q, k, v, window: int = 0, dropout_p: float = 0.0, backend: str = 'auto') -> torch.Tensor:
    """Causal self-attention; `window` > 0 limits each query to its last `window` keys, itself included.

    Args:
        q: (B, H, T, D). k, v: (B, Hkv, T, D), H a multiple of Hkv.
        backend: one of `attention.backends.BACKENDS`.
    Returns:
        (B, H, T, D).
    Raises:
        UserError: a backend that cannot serve these.
    """
    T, D = q.shape[2:]
    window = window if window < T else 0
    name = choose('local' if window else 'global', backend, q.device, q.dtype, D, dropout_p)
    if name == 'flex':
        return flex_local_attention(q, k, v, window or T)
    if name == 'flash_attn':
        return load_flash_attn()(q, k, v, window, dropout_p)
    if name == 'math':
        return math_attention(q, k, v, window, dropout_p)
    return blockwise_local_attention(q, k, v, window, dropout_p) if window else sdpa(q, k, v, dropout_p)


def sdpa(q, k, v, dropout_p: float = 0.0) -> torch.Tensor:
    """Causal, without a window, by torch's scaled_dot_product_attention."""
    gqa = q.size(1) != k.size(1)
    if gqa and q.device.type == 'cpu':  # there SDPA would copy K and V for all heads, where one KV head takes a view
        k, v, gqa = expand_heads(k, q.size(1)), expand_heads(v, q.size(1)), False
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p, enable_gqa=gqa)


def math_attention(q, k, v, window: int = 0, dropout_p: float = 0.0) -> torch.Tensor:
    """The definition: softmax over all scores, in at least float32, under one dense mask. O(T * T) memory."""
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        k, v = (expand_heads(x.to(wide), q.size(1)) for x in (k, v))
        scores = q.to(wide) @ k.transpose(2, 3) * q.size(-1) ** -0.5
        scores = scores.masked_fill(~dense_mask(q.size(2), k.size(2), window, q.device), -torch.inf)
        return (F.dropout(scores.softmax(-1), dropout_p, training=dropout_p > 0) @ v).to(q.dtype)
