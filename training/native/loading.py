"""Compiles and opens train.cpp, and says which runs use it."""
import ctypes
import functools
from pathlib import Path

import torch

import extension
from training.device import multiplies_bfloat16, pick_dtype

SOURCE = Path(__file__).with_name('train.cpp')


class Heads(ctypes.Structure):
    _fields_ = [('data', ctypes.c_void_p),
                *((name, ctypes.c_int64) for name in ('b', 'h', 't', 'half'))]


class Attention(ctypes.Structure):
    _fields_ = [*((name, Heads) for name in 'q k v y dy dq dk dv'.split()),
                *((name, ctypes.c_void_p) for name in ('lse', 'sink', 'dsink', 'sums')),
                *((name, ctypes.c_int64) for name in 'B H Hkv T D parts threads window'.split()),
                ('seed', ctypes.c_uint64), ('dropout', ctypes.c_float)]


class Norm(ctypes.Structure):
    _fields_ = [*((name, Heads) for name in 'x y dy dx'.split()),
                *((name, ctypes.c_void_p) for name in 'gain cos sin dgain'.split()),
                *((name, ctypes.c_int64) for name in 'B H T D threads'.split()),
                ('eps', ctypes.c_float)]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The extension, compiled if necessary; None, after a note, if that is not possible."""
    return extension.opened(SOURCE, _checked)


def _checked(found):
    found.nanokv_train_sizes.restype = ctypes.c_int64
    for k, struct in enumerate((Attention, Norm)):
        if found.nanokv_train_sizes(ctypes.c_int64(k)) != ctypes.sizeof(struct):
            raise extension.Unavailable(f'{struct.__name__} has a different size in the extension')
    return found


def wanted(dtype: str, compiled: bool, device: torch.device) -> bool:
    """Whether a run with these settings uses the extension: on a CPU with 'auto' or 'bfloat16',
    unless the model is compiled. 'float32' is torch's own arithmetic, whose losses are the same to
    the last bit whatever this version of the extension computes."""
    return (dtype in ('auto', 'bfloat16') and device.type == 'cpu' and not compiled
            and library() is not None)


def training_dtype(dtype: str, compiled: bool, device: torch.device) -> torch.dtype:
    """Like `pick_dtype`, but where a run uses the extension, 'auto' is bfloat16 on
    processors that have instructions for it. (torch's own attention in bfloat16 is slower than in
    float32: its backward pass does not use them.)"""
    if dtype == 'auto' and wanted(dtype, compiled, device) and multiplies_bfloat16():
        return torch.bfloat16
    return pick_dtype(dtype, device)
