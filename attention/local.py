"""Sliding-window attention in O(T * W): exact blocks on SDPA anywhere, FlexAttention on CUDA."""
import functools

import torch
import torch.nn.functional as F

from attention.heads import fold_heads, unfold_heads
from attention.masks import block_mask, dense_mask

# below this, many tiny blocks cost more than the few keys they save
MIN_BLOCK = 32


def blockwise_local_attention(q, k, v, window: int, dropout_p: float = 0.0) -> torch.Tensor:
    """Exact sliding-window attention by blocks: each block of queries against its own block of keys and the one before.

        keys      . . . . | . . . . | . . . .      block = max(window, MIN_BLOCK) queries
        block 2           [ span: 2 blocks  ]      inside it the mask is the same for every block but the first

    Args:
        q: (B, H, t, D). k, v: (B, Hkv, S, D) with S >= t; the last t keys are those of the queries' own positions, the
            S - t before them (a ring's contents) come just before, in order; more than window - 1 are not needed.
        window: keys that a query sees, itself included; any value >= 1, whatever t.
        dropout_p: dropout on the attention weights.
    Returns:
        (B, H, t, D).
    """
    t, block = q.size(2), max(window, MIN_BLOCK)
    prefix = k.size(2) - t
    head = min(block, t)
    first = masked_attention(q[:, :, :head], k[:, :, :prefix + head], v[:, :, :prefix + head], window, dropout_p)
    if t <= block:
        return first
    rest = _attend_blocks(q, k[:, :, prefix:], v[:, :, prefix:], window, block, dropout_p)
    return torch.cat([first, rest], dim=2)


def masked_attention(q, k, v, window: int, dropout_p: float = 0.0) -> torch.Tensor:
    """Queries at the end of the keys, under one dense mask. q (B, H, t, D), k and v (B, Hkv, S, D) -> (B, H, t, D)."""
    group = q.size(1) // k.size(1)
    if group == 1 and q.size(2) == k.size(2) <= window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p)
    mask = dense_mask(q.size(2), k.size(2), window, q.device).repeat(group, 1)  # (H/Hkv * t, S)
    y = F.scaled_dot_product_attention(fold_heads(q, k.size(1)), k, v, attn_mask=mask, dropout_p=dropout_p)
    return unfold_heads(y, q.size(1))


def _attend_blocks(q, k, v, window, block, dropout_p):
    """All blocks but the first, as a batch. q (B, H, t, D), k, v (B, Hkv, t, D) -> (B, H, t - block, D)"""
    B, H, t, D = q.shape
    n = -(-t // block)  # blocks, the last one padded
    pad = (0, 0, 0, n * block - t)
    q, k, v = (F.pad(x, pad) if pad[3] else x for x in (q, k, v))
    q = q[:, :, block:].reshape(B, H, n - 1, block, D).transpose(1, 2).flatten(0, 1)  # (B*(n-1), H, block, D)
    k, v = (_spans(x, n, block) for x in (k, v))                                      # (B*(n-1), Hkv, 2*block, D)
    y = masked_attention(q, k, v, window, dropout_p)  # padded queries see at least themselves: no NaN, and they are cut off
    y = y.view(B, n - 1, H, block, D).transpose(1, 2).reshape(B, H, (n - 1) * block, D)
    return y[:, :, :t - block]


def _spans(x, n, block):
    """(B, Hkv, n*block, D) -> (B*(n-1), Hkv, 2*block, D): each block but the first, behind the one before it."""
    x = x.unflatten(2, (n, block))
    return torch.cat([x[:, :, :-1], x[:, :, 1:]], dim=3).transpose(1, 2).flatten(0, 1)


@functools.cache
def _compiled_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention)


def flex_local_attention(q, k, v, window: int, compiled: bool = True) -> torch.Tensor:
    """Sliding-window self-attention by FlexAttention (CUDA; no dropout there). Shapes as in `causal_attention`.

    `compiled=False` runs FlexAttention's eager form, which is how this path is tested on a CPU (forward only: it has
    no backward there in torch 2.11 to 2.15).
    """
    if compiled and not torch.compiler.is_compiling():
        flex = _compiled_flex_attention()
    else:  # where the whole model is being compiled, this is compiled with it
        from torch.nn.attention.flex_attention import flex_attention as flex
    mask = block_mask(q.size(2), window, q.device)
    return flex(q, k, v, block_mask=mask, enable_gqa=q.size(1) != k.size(1))
