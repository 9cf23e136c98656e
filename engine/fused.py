"""Attention for captured decode steps, with QK-norm, RoPE, int8 and the write in one kernel."""
import torch

from attention.backends import triton_usable
from engine.static import StaticCache
from model import CausalSelfAttention


class FusedAttention(CausalSelfAttention):
    """`CausalSelfAttention` that uses the kernel of `attention.kernels.qkv` where it can."""

    def forward(self, x, rope=None, kv=None, cache=None, trim=None):
        if not (isinstance(cache, StaticCache) and self._suits(x, cache)):
            return super().forward(x, rope, kv, cache, trim)
        from attention.kernels.qkv import write_qkv
        B, t, _ = x.shape
        qkv = self.c_attn(x).view(B, t, -1, self.head_dim)
        norms, target = (self.q_norm, self.k_norm), ()
        if self.layer.owns:
            target = cache.cache.stores[self.layer.slot].tensors, *cache.target(self.layer)
        q = write_qkv(qkv, self.n_head, *norms, rope, *target)
        return self.project(cache.read(self.layer, q)), None

    def _suits(self, x, cache) -> bool:
        """False for float64, int4, sinks, tied or offset keys, latents, and K and V that are
        rounded to int8 but stored in a different dtype."""
        rounds_only = self.kv_quant_train == 'int8' and cache.kv_dtype != 'int8'
        wide = x.dtype == torch.float64 or cache.kv_dtype == 'float64'
        slot = self.slot
        plain = self.sink is None and not (slot.tied or slot.offset or cache.kv_dtype == 'int4')
        return (plain and triton_usable(x.device) and self.head_dim % 2 == 0 and not rounds_only
                and not wide)


def fuse(model) -> None:
    """Let the model's attention layers use the kernel, in place."""
    for block in model.transformer.h:
        if type(block.attn) is CausalSelfAttention:
            block.attn.__class__ = FusedAttention
