"""Attention over a whole sequence, as in training: picks the form that suits the window and the device."""
import torch
import torch.nn.functional as F

from attention.heads import expand_heads
from attention.local import blockwise_local_attention, flex_local_attention


def suits_flex(device: torch.device, dtype: torch.dtype, head_dim: int, dropout_p: float) -> bool:
    """Whether local layers run on FlexAttention: it has no dropout, float64 or heads under 16, and no backward off CUDA."""
    return device.type == 'cuda' and dtype != torch.float64 and head_dim >= 16 and dropout_p == 0.0


def causal_attention(q, k, v, window: int = 0, dropout_p: float = 0.0) -> torch.Tensor:
    """Causal self-attention; `window` > 0 limits each query to its last `window` keys, itself included.

    Global: SDPA (its flash backend where there is one). Local: FlexAttention on CUDA; exact blocks elsewhere, and
    wherever FlexAttention cannot serve (dropout, float64, tiny heads).

    Args:
        q: (B, H, T, D). k, v: (B, Hkv, T, D), H a multiple of Hkv.
    Returns:
        (B, H, T, D).
    """
    if window == 0 or q.size(2) <= window:
        gqa = q.size(1) != k.size(1)
        if gqa and q.device.type == 'cpu':  # there SDPA would copy K and V for all heads, where one KV head takes a view
            k, v, gqa = expand_heads(k, q.size(1)), expand_heads(v, q.size(1)), False
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p, enable_gqa=gqa)
    if suits_flex(q.device, q.dtype, q.size(-1), dropout_p):
        return flex_local_attention(q, k, v, window)
    return blockwise_local_attention(q, k, v, window, dropout_p)
