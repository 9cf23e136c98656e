"""Causal and sliding-window masks: the only definition of which query sees which key."""
import torch


def in_window(q_pos, k_pos, window):
    """True where a query at position `q_pos` sees a key at `k_pos`: 0 <= q_pos - k_pos < window.

        window = 3        k 0 1 2 3 4        window = 0: no limit, plain causal attention
                     q 0    x
                       1    x x              flash-attn writes the same window as
                       2    x x x            window_size=(window - 1, 0)
                       3      x x x
                       4        x x x

    Accepts ints, tensors that broadcast, and FlexAttention's index tensors. For the latter,
    `window` must be an int, so that it becomes a constant of the kernel. It may also be a function
    (q_pos, k_pos) -> which of the keys up to its own a query sees (`kv.plan.Layer.mask`).
    """
    distance = q_pos - k_pos
    seen = distance >= 0
    if callable(window):
        return seen & window(q_pos, k_pos)
    if isinstance(window, int) and window == 0:
        return seen
    return seen & (distance < window)


def dense_mask(n_queries: int, n_keys: int, window: int, device=None) -> torch.Tensor:
    """(n_queries, n_keys) bool, True = visible; the last query and key have the same position."""
    q_pos = torch.arange(n_keys - n_queries, n_keys, device=device)
    return in_window(q_pos[:, None], torch.arange(n_keys, device=device)[None, :], window)
