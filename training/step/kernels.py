"""Which attention kernels the layers of a model use in training, and what these need beforehand."""
import torch

from attention.kernels.choose import choose
from attention.kernels.flex import block_mask


def describe_attention(model, dtype: torch.dtype, dropout_p: float) -> str:
    """Describe the kernels that a model's layers will use, as in 'attention: global layers sdpa,
    local layers flex'. Raises UserError if `choose` does."""
    kinds = sorted({layer.kind for layer in model.plan.layers})
    found = [choose(kind, model.attention_backend, model.device, dtype, model.plan.head_dim,
                    dropout_p, model.config.attn_sink) for kind in kinds]
    if 'flash_attn' in found:
        from attention.kernels.flash import load_flash_attn
        load_flash_attn()
    return 'attention: ' + ', '.join(f'{kind} layers {name}' for kind, name in zip(kinds, found))


def prepare(model, n_positions: int) -> None:
    """Build the rotary tables and block masks for sequences of `n_positions`, so that a compiled
    forward pass need not."""
    dtype = model.dtype
    for table in filter(None, (model.rotary or {}).values()):
        table(0, n_positions, model.device, dtype)
    if model.attention_backend not in ('auto', 'flex'):
        return
    for layer in model.plan.layers:
        # evaluation uses no dropout, even if training does
        backend = choose(layer.kind, model.attention_backend, model.device, dtype,
                         model.plan.head_dim, sink=model.config.attn_sink)
        if backend == 'flex':
            window = min(layer.window or n_positions, n_positions)
            block_mask(n_positions, window, model.device)
