"""Attention over an entire sequence, as in training, using one of the backends."""
import torch
import torch.nn.functional as F

from attention.backends import choose
from attention.local import blockwise_local_attention
from attention.masks import dense_mask


def causal_attention(q, k, v, window: int = 0, dropout_p: float = 0.0, backend: str = 'auto'):
    """Causal self-attention; `window` > 0 limits each query to its last `window` keys.

    Args:
        q: (B, H, T, D). k, v: (B, Hkv, T, D), H a multiple of Hkv.
        window: number of keys that a query sees, including its own; 0 = all up to its own.
        backend: one of `attention.backends.BACKENDS`.
    Returns:
        (B, H, T, D).
    Raises:
        UserError: if the backend does not support these arguments.
    """
    T, D = q.shape[2:]
    window = window if window < T else 0
    kind = 'local' if window else 'global'
    name = choose(kind, backend, q.device, q.dtype, D, dropout_p)
    if name == 'flex':
        from attention.kernels.flex import flex_local_attention
        return flex_local_attention(q, k, v, window or T)
    if name == 'flash_attn':
        from attention.kernels.flash import load_flash_attn
        return load_flash_attn()(q, k, v, window, dropout_p)
    if name == 'math':
        return math_attention(q, k, v, window, dropout_p)
    if window:
        return blockwise_local_attention(q, k, v, window, dropout_p)
    return sdpa(q, k, v, dropout_p)


def sdpa(q, k, v, dropout_p: float = 0.0) -> torch.Tensor:
    """Causal attention without a window, using torch's scaled_dot_product_attention."""
    gqa = q.size(1) != k.size(1)
    if gqa and q.device.type == 'cpu':  # on CPU, SDPA copies K and V for every query head
        k, v, gqa = expand_heads(k, q.size(1)), expand_heads(v, q.size(1)), False
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, dropout_p=dropout_p, enable_gqa=gqa)


def expand_heads(x: torch.Tensor, n_head: int) -> torch.Tensor:
    """K or V (B, Hkv, S, D) -> (B, H, S, D), repeated for the query heads; a view if Hkv is 1."""
    B, n_kv_head, S, D = x.shape
    return x[:, :, None].expand(B, n_kv_head, n_head // n_kv_head, S, D).flatten(1, 2)


def math_attention(q, k, v, window: int = 0, dropout_p: float = 0.0) -> torch.Tensor:
    """Reference implementation: softmax over all scores in at least float32, O(T * T) memory."""
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        k, v = (expand_heads(x.to(wide), q.size(1)) for x in (k, v))
        scores = q.to(wide) @ k.transpose(2, 3) * q.size(-1) ** -0.5
        seen = dense_mask(q.size(2), k.size(2), window, q.device)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (F.dropout(weights, dropout_p, training=dropout_p > 0) @ v).to(q.dtype)
