"""FlashAttention: that of torch, and the flash-attn packages, of which version 2 is imported as
flash_attn, version 4 as flash_attn.cute."""
import inspect

import torch
from torch.nn.attention.varlen import varlen_attn

from attention.kernels import choose
from common.errors import UserError

_flash_attn = None  # set when loaded
# from torch 2.13 on; before, K and V may have fewer heads anyway
GQA = {'enable_gqa': True} if 'enable_gqa' in inspect.signature(varlen_attn).parameters else {}


def load_flash_attn():
    """Return the installed attention function (q, k, v, window, dropout_p), see `causal_attention`.

    Raises UserError if the package is installed but cannot be imported.
    """
    global _flash_attn
    if _flash_attn is None:
        try:
            if choose.FLASH_ATTN_VERSION == 2:
                from flash_attn import flash_attn_func
            else:
                from flash_attn.cute import flash_attn_func
        except Exception as e:  # e.g. built for a different torch version
            why = f'{type(e).__name__}: {e}'
            raise UserError(f'the flash-attn package cannot be imported: {why}') from e
        _flash_attn = _adapted(flash_attn_func, choose.FLASH_ATTN_VERSION)
    return _flash_attn


def varlen(q, k, v, window: int):
    """`causal_attention` by torch's FlashAttention for sequences of any lengths, one after the
    other; here all have the same."""
    B, _, T, _ = q.shape
    starts = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=q.device)
    packed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))         # (B * T, H or Hkv, D)
    y = varlen_attn(*packed, starts, starts, T, T,
                    window_size=(window - 1 if window else -1, 0), **GQA)
    return y.unflatten(0, (B, T)).transpose(1, 2)


def _adapted(function, version: int):
    whole = (-1, -1) if version == 2 else (None, None)

    def attend(q, k, v, window, dropout_p):
        dropout = {'dropout_p': dropout_p} if version == 2 else {}  # version 4 has none
        y = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, **dropout,
                     window_size=(window - 1, 0) if window else whole)
        return (y[0] if isinstance(y, tuple) else y).transpose(1, 2)
    return attend
