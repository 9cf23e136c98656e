"""Memory along the sequence: a query sees one key and value for each block of `stride` tokens.

    stride = 3      tokens     0 1 2 | 3 4 5 | 6 7     A mean is of its block's tokens so far.
                    means      0 1 2 | 3 4 5 | 6 7     Query 7 sees the means 2 and 5, of complete
                    query 7        x       x     x     blocks, and 7, its own.

In every channel of a mean each place in the block has a weight of its own, as in DeepSeek-V4's
Heavily Compressed Attention (2026), whose weights also depend on the tokens.
"""
import torch
import torch.nn.functional as F

from attention.local import attention_with, with_sink_score


def running_means(x: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
    """The weighted mean of each token's block up to this token.

    x: (B, Hkv, t, D); the first token begins a block. biases: (Hkv, stride, D), logarithms of the
    weights. Returns (B, Hkv, t, D).
    """
    t, weights = x.size(2), biases.exp()[:, None]                     # (Hkv, 1, stride, D)
    stride = weights.size(2)
    x = F.pad(x, (0, 0, 0, -t % stride)).unflatten(2, (-1, stride))   # (B, Hkv, n, stride, D)
    means = (x * weights).cumsum(3) / weights.cumsum(2)
    return means.flatten(2, 3)[:, :, :t]


def sees_mean(q_pos, k_pos, stride: int):
    """True where a query sees the mean of a block up to the token at `k_pos`: its own, and those of
    complete blocks before its own. With a stride of 1 this is causal attention."""
    complete = k_pos % stride == stride - 1
    return (k_pos == q_pos) | complete & (k_pos // stride < q_pos // stride)


def block_attention(q, k, v, stride: int, dropout_p: float = 0.0, sink=None, first: int = 0):
    """Attention of the last t tokens to the means of blocks.

    Args:
        q: (B, H, t, D), from position `first` on.
        k, v: (B, Hkv, S, D), S >= t: the means of the complete blocks before the block of the first
            query, then of the blocks of all queries up to each of them.
        dropout_p, sink: as in `causal_attention`.
    Returns:
        (B, H, t, D).
    """
    t, D, scale = q.size(2), q.size(3), None
    place = first % stride + torch.arange(t, device=q.device)  # from the first query's block on
    mask = F.pad(sees_mean(place[:, None], place, stride), (k.size(2) - t, 0), value=True)
    if sink is not None:
        q, k, v, scale = with_sink_score(q, k, v, sink)
    return attention_with(mask, q, k, v, dropout_p, scale)[..., :D]
