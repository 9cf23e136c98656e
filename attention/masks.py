"""Who sees whom: the one definition of causality and of the sliding window, and the masks made from it."""
import torch


def in_window(q_pos, k_pos, window):
    """True where a query at position `q_pos` sees a key at position `k_pos`: 0 <= q_pos - k_pos < window.

        window = 3        k 0 1 2 3 4          window = 0: no limit, plain causal attention
                     q 0    x
                       1    x x                (flash-attn writes the same as window_size=(window - 1, 0))
                       2    x x x
                       3      x x x
                       4        x x x

    Works on anything that subtracts and compares: ints, tensors that broadcast, FlexAttention's index tensors. For those
    `window` is an int, which becomes a constant of the kernel: a tensor would be loaded for each masked block.
    """
    distance = q_pos - k_pos
    seen = distance >= 0
    if isinstance(window, int) and window == 0:
        return seen
    return seen & (distance < window)


def dense_mask(n_queries: int, n_keys: int, window: int, device=None) -> torch.Tensor:
    """(n_queries, n_keys) bool, True = seen; the last query stands at the position of the last key."""
    q_pos = torch.arange(n_keys - n_queries, n_keys, device=device)
    return in_window(q_pos[:, None], torch.arange(n_keys, device=device)[None, :], window)


_block_masks = {}
MAX_BLOCK_MASKS = 64  # one per length and window: a bound for programs that see many lengths
FLEX_BLOCK = 128  # queries and keys of a block, FlexAttention's default


def block_mask(n_positions: int, window: int, device: torch.device):
    """FlexAttention's BlockMask of the same window for self-attention over `n_positions`, made once for all layers.

    Call it once before the model is compiled (`GPT.prepare` does): a compiled forward should find it, not build it.
    """
    key = (n_positions, window, str(device))
    if key not in _block_masks:
        if len(_block_masks) >= MAX_BLOCK_MASKS:
            del _block_masks[next(iter(_block_masks))]  # the oldest
        with torch.inference_mode(False):  # a mask first needed while sampling must serve training later
            _block_masks[key] = _make_block_mask(n_positions, window, device)
    return _block_masks[key]


def _make_block_mask(n_positions, window, device):
    """What create_block_mask returns, without its mask of all n_positions * n_positions pairs."""
    from torch.nn.attention.flex_attention import BlockMask
    first = torch.arange(0, n_positions, FLEX_BLOCK, device=device)
    last = first + FLEX_BLOCK - 1
    nearest = first[:, None] - last[None, :]  # (query blocks, key blocks), least and most distance
    farthest = last[:, None] - first[None, :]
    reach = window or n_positions
    seen = (farthest >= 0) & (nearest < reach)
    full = (nearest >= 0) & (farthest < reach)
    full &= last[:, None] < n_positions  # as in create_block_mask, a block that is cut off is partial
    return BlockMask.from_kv_blocks(
        *_ordered(seen & ~full), *_ordered(full), BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=lambda b, h, q_idx, kv_idx: in_window(q_idx, kv_idx, window),
        seq_lengths=(n_positions, n_positions))


def _ordered(blocks):
    """(n, n) bool -> how many are True in each row (1, 1, n), and column indices, those first."""
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], indices.int()[None, None]
