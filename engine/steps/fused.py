"""Blocks for captured decode steps, in five kernels: attention (two where keys are split), which
also does QK-norm, RoPE, int8 and the write, and four Linear layers with LayerNorm, GELU and the
residuals."""
import torch

from attention.backends import triton_usable
from engine.steps.static import StaticCache
from model import Block, CausalSelfAttention


class FusedAttention(CausalSelfAttention):
    """`CausalSelfAttention` from its projections on in one kernel."""

    def write_and_read(self, qkv, rope, cache):
        """qkv (B, 1, ...) from `c_attn` -> (B, H, 1, D), after writing K and V."""
        from attention.kernels.decode import New
        qkv = qkv.view(*qkv.shape[:2], -1, self.head_dim)
        target = ()
        if self.layer.owns:
            target = *cache.target(self.layer), self.slot.kind == 'local'
        return cache.read(self.layer, qkv, new=New(self.n_head, self.q_norm, self.k_norm, rope,
                                                   *target))

    def fuses(self, x, cache) -> bool:
        """False for float64, int4, sinks, gates, masks, tied or offset keys, latents, heads above
        256, and K and V that are rounded to int8 but stored in a different dtype."""
        if not isinstance(cache, StaticCache):
            return False
        rounds_only = self.kv_quant_train == 'int8' and cache.kv_dtype != 'int8'
        wide = x.dtype == torch.float64 or cache.kv_dtype == 'float64'
        slot = self.slot
        other = self.sink is not None or self.gate is not None or slot.tied or slot.offset
        plain = not other and cache.kv_dtype != 'int4'
        return (plain and triton_usable(x.device) and self.head_dim % 2 == 0 and not rounds_only
                and not wide and self.head_dim <= 256 and not self.layer.mask)


class FusedBlock(Block):
    """`Block` that uses these kernels and that of `engine.steps.fused_linear` where it can."""

    def forward(self, x, rope, kv=None, cache=None, *others, **named):
        attn, mlp = self.attn, self.mlp
        if not attn.fuses(x, cache):
            return super().forward(x, rope, kv, cache, *others, **named)
        from engine.steps.fused_linear import fused_linear, takes
        table = rope.get(attn.layer.kind)
        if not takes(x[:, 0], attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj):
            y = attn.write_and_read(attn.c_attn(self.ln_1(x)), table, cache)
            x = x + attn.project(y)
            return x + self.feed_forward(x), None, rope

        x = x[:, 0]                                                            # (B, C)
        qkv = fused_linear(x, attn.c_attn, self.ln_1)
        y = attn.write_and_read(qkv[:, None], table, cache).flatten(1)
        x = fused_linear(y, attn.c_proj, residual=x)
        activation = 'relu2' if mlp.relu2 else mlp.gelu.approximate
        hidden = fused_linear(x, mlp.c_fc, self.ln_2, activation)
        return fused_linear(hidden, mlp.c_proj, residual=x)[:, None], None, rope


def fuse(model) -> None:
    """Let the model's blocks use the kernels, in place."""
    for block in model.transformer.h:
        if type(block) is Block and type(block.attn) is CausalSelfAttention:
            block.__class__, block.attn.__class__ = FusedBlock, FusedAttention


def unfuse(model) -> None:
    """Undo `fuse`."""
    for block in model.transformer.h:
        if type(block) is FusedBlock:
            block.__class__, block.attn.__class__ = Block, CausalSelfAttention
