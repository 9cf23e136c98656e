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

    Works on anything that subtracts and compares: ints, tensors that broadcast, FlexAttention's index tensors
    (for which `window` is a tensor too: a captured number would recompile the kernel for each window).
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


def block_mask(n_positions: int, window: int, device: torch.device):
    """FlexAttention's BlockMask of the same window for self-attention over `n_positions`, made once for all layers.

    Call it once before the model is compiled (`GPT.prepare` does): a compiled forward should find it, not build it.
    """
    key = (n_positions, window, str(device))
    if key not in _block_masks:
        from torch.nn.attention.flex_attention import create_block_mask
        if len(_block_masks) >= MAX_BLOCK_MASKS:
            del _block_masks[next(iter(_block_masks))]  # the oldest
        with torch.inference_mode(False):  # a mask first needed while sampling must serve training later
            w = torch.tensor(window, device=device)
            _block_masks[key] = create_block_mask(lambda b, h, q_idx, kv_idx: in_window(q_idx, kv_idx, w), B=None, H=None,
                                                  Q_LEN=n_positions, KV_LEN=n_positions, device=device)
    return _block_masks[key]
