"""Attention of the new tokens of prompts on a CPU, in C++ (chunks.h): K and V are read as they are
stored, and no mask or copy of them exists."""
import ctypes

import torch

from engine import native

STORED = native.DTYPES | {torch.int8: native.INT8, torch.uint8: native.INT4}


def takes(q, k) -> bool:
    """Whether `attend` takes these: float32 or bfloat16, without gradients."""
    grad = torch.is_grad_enabled() and q.requires_grad
    return (q.device.type == 'cpu' and q.dtype in native.DTYPES and k.dtype in STORED and not grad
            and native.library() is not None)


def describe(stored, paged: bool = False, ring: bool = False, last_key=None) -> native.Slot:
    """The descriptor of stored K and V (units, Hkv, capacity, D), laid out as in `KVStore`."""
    k, capacity = stored[0], stored[0].size(2)
    pointers = [*(x.data_ptr() for x in stored), None, None][:4]
    head_dim = k.size(3) * (2 if k.dtype == torch.uint8 else 1)
    # int4 never is; of one byte a vector, its strides say the same
    transposed = k.dtype != torch.uint8 and k.stride(2) == 1 and capacity > 1
    return native.Slot(*pointers, last_key, k.size(1), head_dim, capacity, STORED[k.dtype], ring,
                       paged, transposed)


def attend(q, stored, before: list[int], lens: list[int], window: int = 0, sink=None, table=None):
    """Attention of new tokens over the stored K and V of their rows, which include theirs.

    Args:
        q: (B, H, t, D).
        stored: K, V (and scales), (B, Hkv, S, D) in order; with `table`, (n_pages, Hkv, page_size,
            D).
        before, lens: (B,), the number of keys before a row's new tokens, and of these, up to t.
        window: number of keys that a query sees, including its own; 0 = all up to its own.
        sink: (H,), a logit per head in the denominator of the softmax, or None.
        table: (B, n) int32, the pages of each row in order; -1 after the last.
    Returns (B, H, t, D), 0 at the padding of shorter rows.
    """
    if table is None:
        stored = [x.contiguous() for x in stored]
    q = q if q.stride(3) == 1 else q.contiguous()
    B, H, t, D = q.shape
    make = torch.empty if min(lens) == t else torch.zeros
    y = make(B, t, H, D, dtype=q.dtype).transpose(1, 2)
    before, lens = torch.tensor(before), torch.tensor(lens)
    sink = None if sink is None else sink.detach().float().contiguous()
    pointers = (None if x is None else x.data_ptr() for x in (q, y, before, lens, table, sink))
    chunk = native.Chunk(describe(stored, table is not None), *pointers, *q.stride()[:3],
                         *y.stride()[:3], B, H, t, 0 if table is None else table.size(1), window,
                         torch.get_num_threads(), q.dtype == torch.bfloat16)
    native.library().nanokv_attend(ctypes.byref(chunk))
    return y
