"""Attention over an entire sequence with FlexAttention or FlashAttention."""
from attention.kernels.choose import choose


def attend_faster(q, k, v, window: int, dropout_p: float, backend: str, sink: bool):
    """`attention.causal.causal_attention` with FlexAttention or FlashAttention; None if torch's
    SDPA is the choice. window: 0 or less than T. Raises UserError as `choose` does."""
    kind = 'local' if window else 'global'
    name = choose(kind, backend, q.device, q.dtype, q.size(3), dropout_p, sink)
    if name == 'flex':
        from attention.kernels.flex import flex_local_attention
        return flex_local_attention(q, k, v, window or q.size(2))
    if name == 'flash_attn':
        from attention.kernels.flash import load_flash_attn
        return load_flash_attn()(q, k, v, window, dropout_p)
    if name == 'varlen':
        from attention.kernels.flash import varlen
        return varlen(q, k, v, window)
    return None
