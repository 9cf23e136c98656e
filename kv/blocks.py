"""Storage of slots that have one entry for each block of tokens (`kv_stride`).

    stride = 4, 10 tokens      index   0       1       2
                               holds   0 .. 3  4 .. 7  8, 9     the mean of this block so far is
                                                                also a state of the row, not rounded
A chunk of tokens comes as means: for each token, of its block up to it (`attention.blocks`). The
means at the ends of blocks are written, and the last one.
"""
import torch

from attention.blocks import block_attention, running_means, weights_of
from attention.cached import cached_attention, dequantized
from kv.slots import GlobalStore


class BlockStore(GlobalStore):
    """Stores the mean of every block of `stride` positions; the last one grows in place."""

    def __init__(self, stride: int, *args):
        super().__init__(*args)
        self.stride = stride

    def append(self, new, rows, start: int):
        """Like `GlobalStore.append`, but returns the complete blocks before the first token's, then
        the chunk; of a single token, all blocks."""
        t, first = new[0].size(2), start // self.stride
        ends = block_ends(start, t, self.stride)
        self.write(rows, first, [x[:, :, ends] for x in new])
        if t == 1:
            return self.read(rows, 0, first + 1)
        return tuple(torch.cat(x, dim=2) for x in zip(self.read(rows, 0, first), new))


def block_ends(start: int, t: int, stride: int) -> list[int]:
    """Which of t tokens from position `start` on end a block, and the last one."""
    return [*range(stride - 1 - start % stride, t - 1, stride), t - 1]


def extend_means(states, step, x, biases) -> torch.Tensor:
    """`running_means` of the new tokens of each row, in a block that may have begun before them.

    states: (rows, Hkv, 1, D), the mean of each row's block; becomes the one after its last new
    token. step: a `kv.cache.Step`. x: (B, Hkv, t, D), like the result.
    """
    stride, means = biases.size(1), torch.zeros_like(x)
    if step.t == 1 and not step.uniform:  # all rows at once
        active = [b for b, n in enumerate(step.lens) if n]
        rows, places = [step.rows[b] for b in active], [step.starts[b] % stride for b in active]
        weights = weights_of(biases)
        share = (weights / weights.cumsum(1))[:, places].transpose(0, 1)[:, :, None]
        before = states[rows].to(x.dtype)
        means[active] = before + share * (x[active] - before)  # a share of 1 at place 0
        states[rows] = means[active].detach().to(states.dtype)
        return means
    for batch, n, rows, start in step.chunks:
        place = start % stride
        before = states[rows].to(x.dtype).expand(-1, -1, place, -1)  # in place of its tokens
        found = running_means(torch.cat([before, x[batch, :, :n]], dim=2), biases)
        means[batch, :, :n] = found[:, :, place:]
        states[rows] = found[:, :, -1:].detach().to(states.dtype)
    return means


def attend_blocks(q, kv, stride: int, sink, t: int, start: int) -> torch.Tensor:
    """Attention of t tokens from position `start` on, or of only their last one, q (B, H, 1, D), to
    what `BlockStore.append` has returned."""
    if q.size(2) > 1:
        return block_attention(q, *dequantized(q.dtype, *kv), stride, sink=sink, first=start)
    if t > 1:
        before = start // stride
        blocks = [*range(before), *(before + end for end in block_ends(start, t, stride))]
        kv = [x[:, :, blocks].contiguous() for x in kv]
    return cached_attention(q, *kv, sink=sink)
