"""Memory along the sequence: a query sees one key and value for each block of `stride` tokens.

    stride = 3      tokens     0 1 2 | 3 4 5 | 6 7     A mean is of its block's tokens so far.
                    means      0 1 2 | 3 4 5 | 6 7     Query 7 sees the means 2 and 5, of complete
                    query 7        x       x     x     blocks, and 7, its own.

In every channel of a mean each place in the block has a weight of its own, as in DeepSeek-V4's
Heavily Compressed Attention (2026), whose weights also depend on the tokens.
"""
import torch
import torch.nn.functional as F

from attention.cached import FEWEST, SCORES, scores_dtype

LARGEST = 30.0  # of the biases' magnitude: exp stays finite, and sums above 0


def running_means(x: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
    """The weighted mean of each token's block up to this token.

    x: (B, Hkv, t, D); the first token begins a block. biases: (Hkv, stride, D), logarithms of the
    weights. Returns (B, Hkv, t, D).
    """
    t, weights = x.size(2), weights_of(biases)[:, None]               # (Hkv, 1, stride, D)
    stride = weights.size(2)
    x = F.pad(x, (0, 0, 0, -t % stride)).unflatten(2, (-1, stride))   # (B, Hkv, n, stride, D)
    means = (x * weights).cumsum(3) / weights.cumsum(2)
    return means.flatten(2, 3)[:, :, :t]


def weights_of(biases: torch.Tensor) -> torch.Tensor:
    return biases.clamp(-LARGEST, LARGEST).exp()


def block_attention(q, k, v, stride: int, dropout_p: float = 0.0, sink=None, first: int = 0):
    """Attention of the last t tokens to the means of blocks: to those of complete blocks before
    its own, and to its own. With a stride of 1 this is causal attention.

    Args:
        q: (B, H, t, D), from position `first` on.
        k, v: (B, Hkv, S, D), S >= t: the means of the complete blocks before the block of the first
            query, then of the blocks of all queries up to each of them.
        dropout_p, sink: as in `causal_attention`.
    Returns:
        (B, H, t, D).
    """
    t, place, before = q.size(2), first % stride, k.size(2) - q.size(2)
    wide = scores_dtype(q.dtype)
    queries = q.to(wide).unflatten(1, (k.size(1), -1)) * q.size(-1) ** -0.5  # (B, Hkv, H/Hkv, t, D)
    own_k, own_v = (x[:, :, None, before:].to(wide) for x in (k, v))
    k, v = (torch.cat([x[:, :, :before], x[:, :, before + stride - 1 - place::stride]], 2).to(wide)
            [:, :, None] for x in (k, v))                             # (B, Hkv, 1, S / stride, D)
    seen = before + (place + torch.arange(t, device=q.device)) // stride  # by each query
    size, y = max(FEWEST, SCORES // (q.size(0) * q.size(1) * max(1, k.size(3)))), []
    for a in range(0, t, size):
        n, now = before + (place + min(a + size, t) - 1) // stride, slice(a, a + size)
        scores = queries[..., now, :] @ k[..., :n, :].transpose(-1, -2)
        scores = scores.masked_fill(torch.arange(n, device=q.device) >= seen[now, None], -torch.inf)
        own = (queries[..., now, :] * own_k[..., now, :]).sum(-1, keepdim=True)
        logits = [] if sink is None else [sink.to(wide).view(k.size(1), -1, 1, 1).expand_as(own)]
        weights = torch.cat([scores, own, *logits], -1).softmax(-1)
        weights = F.dropout(weights, dropout_p, training=dropout_p > 0)
        y.append(weights[..., :n] @ v[..., :n, :] + weights[..., n:n + 1] * own_v[..., now, :])
    return torch.cat(y, 3).flatten(1, 2).to(q.dtype)
