"""Activation recomputation: which activations a training step keeps for its backward pass.

    policy       kept from each block                        recomputed
    'none'       everything                                  nothing
    'selective'  outputs of matmuls and attention            norms, RoPE, GELU, residual sums
    'mlp'        everything but the MLP's activations        MLPs
    'block'      its input                                   blocks, one at a time
    'every:K'    the input of every K-th block               blocks, K at a time
    'sqrt'       'every:K' with K = sqrt(n_layer)            (Chen et al. 2016: O(sqrt L) memory)
    'offload'    everything, in host memory                  nothing; copied there and back

Recomputation is torch's non-reentrant checkpointing: random state is restored (dropout is exact),
autocast and DDP work as usual. K and V that later layers read are kept, as inputs of segments.
"""
import functools
import math
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils.checkpoint import (
    CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts)

from common.errors import UserError
from common.removed import removed

NAMES = ('none', 'selective', 'mlp', 'block', 'sqrt', 'offload')  # the fastest first; and 'every:K'
SMALLEST = 2 ** 16  # bytes; smaller tensors are not worth a copy to the host

aten = torch.ops.aten
MATMULS = {aten.mm.default, aten.addmm.default}
ATTENTION = {getattr(aten, name).default for name in (
    '_scaled_dot_product_flash_attention_for_cpu', '_scaled_dot_product_flash_attention',
    '_scaled_dot_product_efficient_attention', '_scaled_dot_product_cudnn_attention')}


def set_recompute(model, policy: str) -> None:
    """Set the policy of the model's training steps. UserError if `Recompute.parse` fails."""
    recompute = Recompute.parse(policy, model.config.n_layer, model.config.dropout > 0)
    model.recompute = None if policy == 'none' else recompute
    for block in model.transformer.h:
        vars(block).pop('feed_forward', None)
        if policy == 'mlp':  # shadows the method
            block.feed_forward = functools.partial(_recomputed_feed_forward, block)


def _recomputed_feed_forward(block, x):
    if not block.training:
        return type(block).feed_forward(block, x)
    return checkpoint(type(block).feed_forward, block, x, use_reentrant=False)


@dataclass(frozen=True)
class Recompute:
    """A policy for a model of `n_layer` blocks, made by `parse`."""
    name: str = 'none'
    segments: tuple[tuple[int, int], ...] = ()  # (first, last + 1) of blocks recomputed together
    dropout: bool = False  # then the MLPs' outputs are needed, unless they are kept

    @classmethod
    def parse(cls, name: str, n_layer: int, dropout: bool = False) -> 'Recompute':
        """Parse a policy. Raises UserError if it is unknown, or K is not from 1 to n_layer."""
        kind, colon, number = name.partition(':')
        size = {'block': 1, 'selective': 1, 'sqrt': math.isqrt(n_layer - 1) + 1}.get(name, 0)
        if kind == 'every' and colon:
            if not number.isdecimal() or not 1 <= int(number) <= n_layer:
                raise UserError(f'recompute={name!r}: K must be a whole number from 1 to '
                                f'n_layer={n_layer}')
            size = int(number)
        elif name not in NAMES:
            allowed = ', '.join(map(repr, NAMES))
            raise UserError(removed('recompute', name)
                            or f"recompute={name!r}: allowed are {allowed} and 'every:K'")
        starts = range(0, n_layer, size) if size else ()
        segments = tuple((first, min(first + size, n_layer)) for first in starts)
        return cls(name, segments, dropout)

    def __call__(self, blocks, n_layer: int, x):
        """Return x after all blocks. blocks: (first, last, x, kvs) -> x and kvs after the blocks
        first to last - 1; kvs maps a slot to its owner's K and V, which later layers read."""
        kvs, context = {}, {}
        if self.name == 'offload':
            # fake tensors support neither streams nor pinned memory
            with offloaded(x.device, streams=not isinstance(x, FakeTensor)):
                return blocks(0, n_layer, x, kvs)[0]
        if self.name == 'selective':
            kept = functools.partial(_select, self.dropout)
            context['context_fn'] = functools.partial(create_selective_checkpoint_contexts, kept)
        for first, last in self.segments:
            x, kvs = checkpoint(blocks, first, last, x, kvs, use_reentrant=False, **context)
        return x if self.segments else blocks(0, n_layer, x, kvs)[0]


def _select(dropout, context, op, *args, **kwargs):
    """Choose the operations whose outputs 'selective' keeps: attention and matmuls, without
    narrowing ones (the MLP's second): their output is as large as the block's, which the next block
    keeps anyway, and recomputation stops before it, unless dropout follows."""
    kept = op in ATTENTION or op.name().startswith(
        ('flex_attention', 'flash_attn::', 'nanokv::attention'))
    if op in MATMULS:  # mm(x, w) or addmm(bias, x, w)
        kept = dropout or args[-2].size(-1) <= args[-1].size(-1)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def offloaded(device: torch.device, streams: bool = True):
    """Return a context that keeps tensors saved for the backward pass, except parameters, in host
    memory: on CUDA pinned, copied on a stream of its own if `streams`; on a CPU for tests."""
    stream = torch.cuda.Stream(device) if streams and device.type == 'cuda' else None

    def pack(x):
        if isinstance(x, Parameter):
            return x
        if x.device != device or x.nbytes < SMALLEST or isinstance(x._base, Parameter):
            return x.detach()  # returning x would keep it alive through its own graph
        copy = torch.empty_like(x, device='cpu', pin_memory=stream is not None)
        if stream is None:
            return copy.copy_(x.detach()), x.device, None
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copy.copy_(x.detach(), non_blocking=True)
            done = stream.record_event()
        x.record_stream(stream)  # prevents its reuse before it has been copied
        return copy, x.device, done

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


def _unpack(packed):
    if torch.is_tensor(packed):
        return packed
    copy, device, done = packed
    if done is not None:
        torch.cuda.current_stream(device).wait_event(done)
    return copy.to(device, non_blocking=True)
