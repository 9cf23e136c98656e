"""What of a training step's activations is kept for the backward pass, and what it computes again.

    policy       kept of each block                                   computed again
    'none'       all                                                  nothing
    'selective'  outputs of the products with weights, of attention   norms, RoPE, GELU, sums
    'mlp'        all but what the MLP needs                           the MLPs
    'block'      its input                                            all blocks, one at a time
    'every:K'    the input of every K-th block                        all blocks, K at a time
    'sqrt'       as 'every:K' with K = the square root of n_layer     (Chen et al. 2016: memory of O(sqrt L) blocks)
    'offload'    all, in host memory                                  nothing; it is copied there and back

Recomputation is torch's non-reentrant checkpointing: random numbers are restored (dropout is exact), autocast and DDP work
as without. A block's K and V that later layers read cross segments as inputs, and are kept.
"""
import functools
import math
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from config.errors import UserError
from training.offload import offloaded

NAMES = ('none', 'selective', 'mlp', 'block', 'sqrt', 'offload')  # and 'every:K'

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default}
ATTENTION = {getattr(aten, name).default for name in (
    '_scaled_dot_product_flash_attention_for_cpu', '_scaled_dot_product_flash_attention',
    '_scaled_dot_product_efficient_attention', '_scaled_dot_product_cudnn_attention') if hasattr(aten, name)}


def set_recompute(model, policy: str) -> None:
    """Have the model's training steps keep what `policy` says, one of those above.

    Raises:
        UserError: no such policy, or K is not from 1 to n_layer.
    """
    recompute = Recompute.parse(policy, model.config.n_layer, model.config.dropout > 0)
    model.recompute = None if policy == 'none' else recompute
    for block in model.transformer.h:
        vars(block).pop('feed_forward', None)
        if policy == 'mlp':  # in place of the method
            block.feed_forward = functools.partial(_recomputed_feed_forward, block)


def _recomputed_feed_forward(block, x):
    if not block.training:
        return type(block).feed_forward(block, x)
    return checkpoint(type(block).feed_forward, block, x, use_reentrant=False)


def policy_of(model) -> str:
    """The policy that `set_recompute` has set."""
    return 'none' if model.recompute is None else model.recompute.name


@dataclass(frozen=True)
class Recompute:
    """A policy for a model of `n_layer` blocks; `parse` makes it from its name.

    segments: (first, last) of the blocks that are computed again together; () where blocks are not.
    dropout: the model has some, and so the outputs of its MLPs are computed again unless they are kept.
    """
    name: str = 'none'
    segments: tuple[tuple[int, int], ...] = ()
    dropout: bool = False

    @classmethod
    def parse(cls, name: str, n_layer: int, dropout: bool = False) -> 'Recompute':
        """Raises UserError: no such policy, or K is not from 1 to n_layer."""
        kind, colon, number = name.partition(':')
        if kind == 'every' and colon:
            if not number.isdecimal() or not 1 <= int(number) <= n_layer:
                raise UserError(f'recompute={name!r}: K must be a whole number from 1 to n_layer={n_layer}')
            return cls(name, _segments(n_layer, int(number)), dropout)
        if name not in NAMES:
            raise UserError(f"recompute={name!r}: allowed are {', '.join(map(repr, NAMES))}, 'every:K', and in train.py 'auto'")
        if name in ('block', 'selective'):
            return cls(name, _segments(n_layer, 1), dropout)
        return cls(name, _segments(n_layer, math.isqrt(n_layer - 1) + 1) if name == 'sqrt' else (), dropout)

    def __call__(self, blocks, n_layer: int, x):
        """x after all blocks. blocks: (first, last, x, kvs) -> x and kvs after the blocks first to last - 1, kvs being
        slot -> K, V of its owner, which later layers read."""
        kvs = {}
        if self.name == 'offload':
            with offloaded(x.device):
                return blocks(0, n_layer, x, kvs)[0]
        context = {}
        if self.name == 'selective':
            kept = _selected_before_dropout if self.dropout else _selected
            context = {'context_fn': functools.partial(create_selective_checkpoint_contexts, kept)}
        for first, last in self.segments:
            x, kvs = checkpoint(blocks, first, last, x, kvs, use_reentrant=False, **context)
        return x if self.segments else blocks(0, n_layer, x, kvs)[0]


def _segments(n_layer, size):
    return tuple((first, min(first + size, n_layer)) for first in range(0, n_layer, size))


def _selected(context, op, *args, **kwargs):
    """What 'selective' keeps. Not what narrows the hidden layer of an MLP: its output is of the size of the block's, which the
    next block keeps anyway, and the recomputation ends before it."""
    if op in ATTENTION or op.name().startswith(('flex_attention', 'flash_attn::')):  # the latter is the package's
        return CheckpointPolicy.MUST_SAVE
    if op in PRODUCTS:  # mm(x, w) or addmm(bias, x, w)
        inner, outer = args[-2].size(-1), args[-1].size(-1)
        return CheckpointPolicy.PREFER_RECOMPUTE if inner > outer else CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _selected_before_dropout(context, op, *args, **kwargs):
    """All products: behind that output of the MLP there is a dropout, up to which everything is computed again."""
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else _selected(context, op, *args, **kwargs)
