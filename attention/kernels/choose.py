"""Which backend computes attention over an entire sequence.

    backend       global layers      local layers             supports
    'sdpa'        torch's SDPA       exact blocks on SDPA     everything
    'flex'        FlexAttention      FlexAttention            CUDA, no dropout, no float64, D >= 16
    'flash_attn'  the package        the package's window     CUDA, half precision, D <= 256
    'varlen'      torch's own FlashAttention, with its window  the same, no dropout
    'math'        softmax of all scores, in at least float32  everything, slowly: a reference
    'auto'        flash_attn, sdpa   flex, flash_attn, sdpa   picks the first one that works

Requesting a backend that does not work is an error (`choose`); there is no silent fallback.
Only 'sdpa' and 'math' have attention sinks.
"""
import contextlib
from importlib import metadata

import torch

from attention.backends import HALF
from common.errors import UserError

BACKENDS = ('auto', 'sdpa', 'flex', 'flash_attn', 'varlen', 'math')

# FlexAttention, flash-attn's window and torch's have not been compared yet: that needs a GPU
PREFERRED = {'global': ('flash_attn', 'sdpa'), 'local': ('flex', 'flash_attn', 'sdpa')}


def choose(kind: str, requested: str, device, dtype, head_dim: int, dropout_p: float = 0.0,
           sink: bool = False) -> str:
    """Return the backend for layers of one kind ('global' or 'local').

    Raises UserError if `requested` is not in BACKENDS or does not work here; the message says why.
    """
    if requested == 'auto':
        return next(name for name in PREFERRED[kind]
                    if not why_unavailable(name, device, dtype, head_dim, dropout_p, sink))
    if requested not in BACKENDS:
        allowed = ', '.join(map(repr, BACKENDS))
        raise UserError(f'attention_backend={requested!r}: allowed are {allowed}')
    why = why_unavailable(requested, device, dtype, head_dim, dropout_p, sink)
    if why:
        raise UserError(f'attention_backend={requested!r} {why}')
    return requested


def why_unavailable(name: str, device, dtype, head_dim: int, dropout_p: float, sink=False) -> str:
    """Return why a backend does not work here; '' if it does."""
    if name in ('sdpa', 'math'):
        return ''
    if device.type != 'cuda':
        return f"runs on CUDA, not on device='{device.type}'"
    if sink:
        return 'has no attention sink (attn_sink=True)'
    of = f'(dtype {str(dtype).removeprefix("torch.")}, head_dim {head_dim})'
    if name in ('flex', 'varlen') and dropout_p:
        return f'has no dropout (dropout={dropout_p})'
    if name == 'flex':
        wrong = dtype == torch.float64 or head_dim < 16
        return f'has neither float64 nor heads below 16 {of}' if wrong else ''
    if name == 'flash_attn' and not FLASH_ATTN_VERSION:
        return ('needs a package: pip install flash-attn (built with nvcc), '
                'or flash-attn-4 (Hopper, Blackwell)')
    if dtype not in HALF or head_dim > 256:
        return f'takes bfloat16 and float16, heads of at most 256 {of}'
    if name == 'varlen' and head_dim % 8:
        return f'takes heads of a multiple of 8 {of}'
    if FLASH_ATTN_VERSION == 4 and dropout_p:
        return f'has no dropout in version 4 (dropout={dropout_p})'
    return ''


def _flash_attn_version() -> int:
    """Return 2, 4, or 0 if neither package is installed. Imports nothing."""
    for version, name in ((2, 'flash-attn'), (4, 'flash-attn-4')):
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.version(name)
            return version
    return 0


FLASH_ATTN_VERSION = _flash_attn_version()  # looked up at import: a compiled forward cannot
