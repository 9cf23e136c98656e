"""What computes attention over whole sequences: the backends, what each of them can do, and how one is chosen.

    backend        global layers               local layers                  can
    'sdpa'         SDPA: flash, cuDNN, ...     exact blocks on SDPA          everything
    'flex'         FlexAttention               FlexAttention                 CUDA, no dropout, no float64, head_dim >= 16
    'flash_attn'   the flash-attn package      its own window                CUDA, half precision, head_dim <= 256; 4 no dropout
    'math'         softmax of all scores, in at least float32                everything, slowly: to compare with
    'auto'         flash_attn, else sdpa       flex, else flash_attn, else sdpa

Nothing falls back in silence: a backend that was asked for and cannot serve is an error (`choose`).
"""
from importlib import metadata

import torch

from config.errors import UserError

BACKENDS = ('auto', 'sdpa', 'flex', 'flash_attn', 'math')
# What 'auto' takes, the first that can. FlexAttention against flash-attn's window is not measured yet: no GPU was at hand.
PREFERRED = {'global': ('flash_attn', 'sdpa'), 'local': ('flex', 'flash_attn', 'sdpa')}
HALF = (torch.bfloat16, torch.float16)


def choose(kind: str, wish: str, device: torch.device, dtype: torch.dtype, head_dim: int, dropout_p: float = 0.0) -> str:
    """The backend of layers of one kind ('global' or 'local').

    Raises:
        UserError: `wish` is none of BACKENDS, or cannot serve here; it says why.
    """
    if wish == 'auto':
        return next(name for name in PREFERRED[kind] if not obstacle(name, device, dtype, head_dim, dropout_p))
    if wish not in BACKENDS:
        raise UserError(f"attention_backend={wish!r}: allowed are {', '.join(map(repr, BACKENDS))}")
    why = obstacle(wish, device, dtype, head_dim, dropout_p)
    if why:
        raise UserError(f'attention_backend={wish!r} {why}')
    return wish


def obstacle(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, dropout_p: float) -> str:
    """Why a backend cannot serve; '' = it can."""
    if name in ('sdpa', 'math'):
        return ''
    if device.type != 'cuda':
        return f"runs on CUDA, not on device='{device.type}'"
    if name == 'flex':
        if dropout_p:
            return f'has no dropout (dropout={dropout_p})'
        if dtype == torch.float64 or head_dim < 16:
            return f'has neither float64 nor heads below 16 (dtype {_short(dtype)}, head_dim {head_dim})'
        return ''
    if not FLASH_ATTN_VERSION:
        return 'needs a package: pip install flash-attn (built with nvcc), or flash-attn-4 (Hopper, Blackwell)'
    if dtype not in HALF or head_dim > 256:
        return f'takes bfloat16 and float16, heads of at most 256 (dtype {_short(dtype)}, head_dim {head_dim})'
    return f'has no dropout in version 4 (dropout={dropout_p})' if FLASH_ATTN_VERSION == 4 and dropout_p else ''


def describe(model, dtype: torch.dtype, dropout_p: float) -> str:
    """'attention: global layers sdpa, local layers flex' of a model's layers.

    Raises:
        UserError: as `choose`.
    """
    kinds = sorted({layer.kind for layer in model.plan.layers})
    found = [choose(kind, model.attention_backend, model.device, dtype, model.plan.head_dim, dropout_p) for kind in kinds]
    if 'flash_attn' in found:
        load_flash_attn()
    return 'attention: ' + ', '.join(f'{kind} layers {name}' for kind, name in zip(kinds, found))


def _short(dtype):
    return str(dtype).removeprefix('torch.')


# -- the flash-attn packages: both are imported as flash_attn, 4 as flash_attn.cute -----------------------------------

def _installed_version() -> int:
    """2, 4, or 0 where there is none. Nothing is imported, and a compiled forward need not look."""
    for version, name in ((2, 'flash-attn'), (4, 'flash-attn-4')):
        try:
            metadata.version(name)
            return version
        except metadata.PackageNotFoundError:
            pass
    return 0


FLASH_ATTN_VERSION = _installed_version()
_flash_attn = None  # once loaded


def load_flash_attn():
    """The function of the installed version: (q, k, v, window, dropout_p), as `attention.causal.causal_attention`.

    Raises:
        UserError: it is there but cannot be imported.
    """
    global _flash_attn
    if _flash_attn is None:
        try:
            if FLASH_ATTN_VERSION == 2:
                from flash_attn import flash_attn_func
            else:
                from flash_attn.cute import flash_attn_func
        except Exception as e:  # such as one built for another torch
            raise UserError(f'the flash-attn package cannot be imported: {type(e).__name__}: {e}') from e
        _flash_attn = (_version_2 if FLASH_ATTN_VERSION == 2 else _version_4)(flash_attn_func)
    return _flash_attn


def _version_2(function):
    def attend(q, k, v, window, dropout_p):
        y = function(*(x.transpose(1, 2) for x in (q, k, v)), dropout_p=dropout_p, causal=True,
                     window_size=(window - 1, 0) if window else (-1, -1))
        return y.transpose(1, 2)
    return attend


def _version_4(function):
    def attend(q, k, v, window, dropout_p):
        y = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=True,
                     window_size=(window - 1, 0) if window else (None, None))
        return (y[0] if isinstance(y, tuple) else y).transpose(1, 2)
    return attend
