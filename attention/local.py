"""Sliding-window attention in O(T * W): exact blocks on SDPA anywhere, FlexAttention on CUDA."""
import functools
import types

import torch
import torch.nn.functional as F

from attention.heads import fold_heads, unfold_heads
from attention.masks import block_mask, dense_mask

MIN_BLOCK = 32  # below this, many tiny blocks cost more than the few keys they save


def blockwise_local_attention(q, k, v, window: int, dropout_p: float = 0.0) -> torch.Tensor:
    """Exact sliding-window attention by blocks: each block of queries against the span of keys that it can see.

        keys      . . | . . | . . | . . | . .      window = 4, blocks of 2 queries
        block 3         [     span      ]          inside it the mask is the same for every block behind the first window

    Args:
        q: (B, H, t, D). k, v: (B, Hkv, S, D) with S >= t; the last t keys are those of the queries' own positions, the
            S - t before them (a ring's contents) come just before, in order; more than window - 1 are not needed.
        window: keys that a query sees, itself included; any value >= 1, whatever t.
        dropout_p: dropout on the attention weights.
    Returns:
        (B, H, t, D).
    """
    t, prefix = q.size(2), k.size(2) - q.size(2)
    block = _block_size(window, q.size(1) // k.size(1))
    back = -(-(window - 1) // block) * block  # whole blocks that hold the window - 1 keys before a block
    head = min(max(back, block), t)
    q, later = q.split([head, t - head], dim=2)
    first = masked_attention(q, k[:, :, :prefix + head], v[:, :, :prefix + head], window, dropout_p)
    if t <= head:
        return first
    start = head - back
    rest = _attend_blocks(later, k[:, :, prefix + start:], v[:, :, prefix + start:], window, block, dropout_p)
    return torch.cat([first, rest], dim=2)


def _block_size(window: int, group: int) -> int:
    """Queries of a block. Small blocks waste fewer products (a span is window + block keys), but the gradient of K and V is
    first made span by span, window / block times their size: `group` query heads to a KV head pay for as much."""
    return max(MIN_BLOCK, window // (group + 1))


def masked_attention(q, k, v, window: int, dropout_p: float = 0.0) -> torch.Tensor:
    """Queries at the end of the keys, under one dense mask. q (B, H, t, D), k and v (B, Hkv, S, D) -> (B, H, t, D)."""
    group = q.size(1) // k.size(1)
    if group == 1 and q.size(2) == k.size(2) <= window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p)
    mask = dense_mask(q.size(2), k.size(2), window, q.device).repeat(group, 1)  # (H/Hkv * t, S)
    y = F.scaled_dot_product_attention(fold_heads(q, k.size(1)), k, v, attn_mask=mask, dropout_p=dropout_p)
    return unfold_heads(y, q.size(1))


def _attend_blocks(q, k, v, window, block, dropout_p):
    """Blocks of queries that all have `back` keys before them. q (B, H, t, D), k, v (B, Hkv, back + t, D) -> as q.

    A batch of B * Hkv with the blocks as its heads, because spans of K and V are then views that overlap, not copies.
    """
    B, H, t, D = q.shape
    n_kv_head, back = k.size(1), k.size(2) - t
    n = -(-t // block)  # blocks, the last one padded
    pad = (0, 0, 0, n * block - t)
    q, k, v = (F.pad(x, pad) if pad[3] else x for x in (q, k, v))
    q = q.reshape(B * n_kv_head, H // n_kv_head, n, block, D).transpose(1, 2)        # (B*Hkv, n, H/Hkv, block, D)
    k, v = (x.reshape(B * n_kv_head, -1, D).unfold(1, back + block, block).transpose(2, 3) for x in (k, v))
    mask = dense_mask(block, back + block, window, q.device).repeat(H // n_kv_head, 1)
    # padded queries see at least themselves: no NaN, and they are cut off
    y = F.scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=mask, dropout_p=dropout_p)
    y = y.view(B * n_kv_head, n, H // n_kv_head, block, D).transpose(1, 2).reshape(B, H, n * block, D)
    return y[:, :, :t]


@functools.cache
def _compiled_flex_attention(layouts, window):
    """FlexAttention compiled for one layout of q, k and v and one window.

    Dynamo counts recompilations per code object. Past its limit it runs the function eagerly, which holds all scores in memory,
    O(T * T). So each case gets its own copy of the code, and fullgraph=True makes the limit an error.
    """
    attend = types.FunctionType(_flex_attention.__code__.replace(), globals())
    return torch.compile(attend, dynamic=False, fullgraph=True)


def _flex_attention(q, k, v, mask, kernel_options):
    from torch.nn.attention.flex_attention import flex_attention
    gqa = q.size(1) != k.size(1)
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=gqa, kernel_options=kernel_options)


def flex_local_attention(q, k, v, window: int, compiled: bool = True, kernel_options=None) -> torch.Tensor:
    """Sliding-window self-attention by FlexAttention (CUDA; no dropout there). Shapes as in `causal_attention`.

    `compiled=False` runs FlexAttention's eager form, which is how this path is tested on a CPU (forward only: it has
    no backward there in torch 2.11 to 2.15). kernel_options: FlexAttention's own, as {'BACKEND': 'FLASH'}.
    """
    mask = block_mask(q.size(2), window, q.device)
    # By default Inductor takes its decoding kernel for T < 128. In torch 2.11 to 2.13 that kernel has no
    # valid configuration for some T (96 with 4 query heads per KV head), and compilation fails
    # (pytorch #185349).
    kernel_options = {'BACKEND': 'TRITON', **(kernel_options or {})}
    if compiled and not torch.compiler.is_compiling():
        layouts = tuple((x.shape, x.stride(), x.dtype, x.device) for x in (q, k, v))
        attend = _compiled_flex_attention(layouts, window)
    else:  # where the whole model is being compiled, this is compiled with it
        attend = _flex_attention
    return attend(q, k, v, mask, kernel_options)
