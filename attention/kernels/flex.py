"""Sliding windows with FlexAttention on CUDA: block masks, and a kernel per layout and window."""
import functools
import types

import torch

from attention.masks import in_window

_block_masks = {}
MAX_BLOCK_MASKS = 64  # one per length and window; a limit for programs that use many lengths
FLEX_BLOCK = 128  # queries and keys per block, FlexAttention's default


def block_mask(n_positions: int, window: int, device: torch.device):
    """FlexAttention's BlockMask of the window for self-attention over `n_positions`, built once
    for all layers.

    Call it before compiling the model (as `training.step.kernels.prepare` does), so that a compiled
    forward pass finds the mask in the cache instead of building it.
    """
    key = (n_positions, window, str(device))
    if key not in _block_masks:
        if len(_block_masks) >= MAX_BLOCK_MASKS:
            del _block_masks[next(iter(_block_masks))]  # the oldest
        with torch.inference_mode(False):  # a mask made while sampling must also work in training
            _block_masks[key] = _make_block_mask(n_positions, window, device)
    return _block_masks[key]


def _make_block_mask(n_positions, window, device):
    """Like create_block_mask, but without a mask of all n_positions * n_positions pairs."""
    from torch.nn.attention.flex_attention import BlockMask
    first = torch.arange(0, n_positions, FLEX_BLOCK, device=device)
    last = first + FLEX_BLOCK - 1
    nearest = first[:, None] - last[None, :]  # (query blocks, key blocks): min, max distance
    farthest = last[:, None] - first[None, :]
    reach = window or n_positions
    seen = (farthest >= 0) & (nearest < reach)
    full = (nearest >= 0) & (farthest < reach)
    full &= last[:, None] < n_positions  # as in create_block_mask, a truncated block is partial
    return BlockMask.from_kv_blocks(
        *_ordered(seen & ~full), *_ordered(full), BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=lambda b, h, q_idx, kv_idx: in_window(q_idx, kv_idx, window),
        seq_lengths=(n_positions, n_positions))


def _ordered(blocks):
    """(n, n) bool -> how many are True in each row (1, 1, n), and column indices, True first."""
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], indices.int()[None, None]


@functools.cache
def _compiled_flex_attention(layouts, window):
    """FlexAttention compiled for one layout of q, k and v and one window.

    Past Dynamo's limit of recompilations the function would run eagerly, which keeps all scores in
    memory, O(T * T); fullgraph=True makes reaching the limit an error.
    """
    return torch.compile(with_own_code(_flex_attention), dynamic=False, fullgraph=True)


def with_own_code(function):
    """A copy of a plain function with a code object of its own, to compile it for one more case:
    Dynamo limits the recompilations of a code object (to 8)."""
    return types.FunctionType(function.__code__.replace(), function.__globals__)


def _flex_attention(q, k, v, mask):
    from torch.nn.attention.flex_attention import flex_attention
    # By default Inductor uses its decoding kernel for T < 128. In torch 2.11 to 2.13 that kernel
    # has no valid configuration for some T (96 with 4 query heads per KV head), and compilation
    # fails (pytorch #185349).
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=q.size(1) != k.size(1),
                          kernel_options={'BACKEND': 'TRITON'})


def flex_local_attention(q, k, v, window: int, compiled: bool = True):
    """Sliding-window self-attention with FlexAttention (CUDA; no dropout). Shapes as in
    `causal_attention`.

    compiled: False runs FlexAttention's eager form, which is how this path is tested on a CPU
    (forward only: it has no backward on CPU in torch 2.11 to 2.15).
    """
    mask = block_mask(q.size(2), window, q.device)
    if compiled and not torch.compiler.is_compiling():
        layouts = tuple((x.shape, x.stride(), x.dtype, x.device) for x in (q, k, v))
        attend = _compiled_flex_attention(layouts, window)
    else:  # compiled with the rest of the model
        attend = _flex_attention
    return attend(q, k, v, mask)
