"""Linear layers on a CPU, fast for the few rows of a decode step, in bfloat16 for many; GELU."""
import ctypes
import functools
import math
import sys
import time
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from engine import native

MOST_ROWS = 256
CONVERTED = 2 ** 22  # elements of a bfloat16 weight that are in float32 at a time, 16 MB


class FewRowsLinear(nn.Linear):
    """nn.Linear that, in float32 and bfloat16 on a CPU, uses the extension's matmul for up to
    `few_rows` rows, where it is faster, and `by_torch` for more."""

    def forward(self, x):
        w, plain = self.weight, torch.compiler.is_compiling() or torch.is_grad_enabled()
        if (plain or type(w) is not nn.Parameter or w.dtype not in native.DTYPES
                or w.device.type != 'cpu' or x.dtype != w.dtype or x.size(-1) % 8):
            return F.linear(x, w, self.bias)
        if x.numel() <= few_rows(x.dtype) * x.size(-1):
            return by_extension(describe(self), x).to(x.dtype)
        return by_torch(x, w, self.bias)


class FastGELU(nn.GELU):
    """nn.GELU by the extension, where torch's would take a good part of a prompt's time."""

    def forward(self, x):
        plain = torch.compiler.is_compiling() or torch.is_grad_enabled()
        if plain or x.dtype not in native.DTYPES or x.device.type != 'cpu' or not native.library():
            return super().forward(x)
        x = x.contiguous()
        y = torch.empty_like(x)
        no_gradient = ctypes.c_void_p()
        native.library().nanokv_gelu(
            ctypes.c_int64(torch.get_num_threads()), ctypes.c_void_p(x.data_ptr()), no_gradient,
            ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(x.numel()),
            self.approximate == 'tanh', x.dtype == torch.bfloat16)
        return y


def describe(linear) -> tuple[native.Linear, tuple]:
    """Return (descriptor of a Linear layer, in floats or packed, for the extension; the tensors
    that must outlive the descriptor)."""
    bias = None if linear.bias is None else linear.bias.detach().float()
    scale = getattr(linear, 'scale', None)
    kept = linear.weight.detach(), scale, bias
    kind = native.DTYPES[linear.weight.dtype] if scale is None else linear.kind
    return native.Linear(*(None if x is None else x.data_ptr() for x in kept), linear.out_features,
                         linear.in_features, kind, getattr(linear, 'group', 0)), kept


def by_extension(described, x: torch.Tensor) -> torch.Tensor:
    """x (..., k) -> (..., n) float32. described: as returned by `describe`."""
    linear, _kept = described
    rows = x.detach().reshape(-1, linear.k).float().contiguous()
    y = rows.new_empty(len(rows), linear.n)
    native.library().nanokv_linear(
        ctypes.byref(linear), ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(len(rows)),
        ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(torch.get_num_threads()))
    return y.view(*x.shape[:-1], linear.n)


def by_torch(x: torch.Tensor, weight: torch.Tensor, bias=None) -> torch.Tensor:
    """F.linear. In bfloat16 it goes through float32 where that is faster, as on processors without
    instructions for bfloat16."""
    n, k = weight.shape
    if weight.dtype != torch.bfloat16 or x.numel() <= 8 * k or not float32_is_faster():
        return F.linear(x, weight, bias)
    wide, y = x.float(), x.new_empty(*x.shape[:-1], n)
    for start in range(0, n, max(1, CONVERTED // k)):
        rows = slice(start, start + max(1, CONVERTED // k))
        y[..., rows] = F.linear(wide, weight[rows].float(), bias if bias is None
                                else bias[rows].float())
    return y


@functools.cache
def float32_is_faster() -> bool:
    """Whether a bfloat16 weight is multiplied faster after conversion; takes about 50 ms."""
    x, weight = (torch.ones(n, 768, dtype=torch.bfloat16) for n in (64, 768))
    converted, plain = _seconds(lambda: F.linear(x.float(), weight.float()).bfloat16(),
                                lambda: F.linear(x, weight))
    return converted < plain


def few_rows(dtype: torch.dtype) -> int:
    """The number of rows up to which the extension's matmul is faster; 0 without it."""
    return _measured(dtype) if native.library() else 0


@functools.cache
def _measured(dtype) -> int:
    rows = MOST_ROWS
    while rows and not _is_fast(dtype, rows):
        rows //= 4
    return sys.maxsize if rows == MOST_ROWS else rows


@functools.cache
def suits_prompts(dtype) -> bool:
    """Whether a C++ step is not slower than torch for many tokens: with AMX it never is. Elsewhere
    its matmuls may take 1.3 times as long: the rest gains more (measured with 124M parameters on 2
    AVX-512 BF16 cores)."""
    on_tiles = dtype == torch.bfloat16 and native.library().tiles
    return on_tiles or _is_fast(dtype, MOST_ROWS, 1.3)


def _is_fast(dtype, rows: int, most: float = 1.0) -> bool:
    """Whether the extension takes at most `most` times as long as torch, for a weight of GPT-2's
    MLP; takes up to 150 ms."""
    weight, x = torch.ones(3072, 768, dtype=dtype), torch.ones(rows, 768, dtype=dtype)
    linear = describe(SimpleNamespace(weight=weight, bias=None, out_features=3072, in_features=768))
    ours, torchs = _seconds(lambda: by_extension(linear, x), lambda: by_torch(x, weight))
    return ours <= most * torchs


def _seconds(*calls) -> list[float]:
    """The least CPU time of each call, on one thread and in turns. Other programs lengthen the wall
    time of each differently, above all with several threads: torch's wait for one another."""
    n_threads, least = torch.get_num_threads(), [math.inf] * len(calls)
    torch.set_num_threads(1)
    try:
        for _ in range(7):
            for i, call in enumerate(calls):
                start = time.thread_time()
                call()
                least[i] = min(least[i], time.thread_time() - start)
    finally:
        torch.set_num_threads(n_threads)
    return least


def speed_up_on_cpu(model) -> None:
    """Turn the model's Linear layers into `FewRowsLinear`, with the same weights, and its GELUs
    into `FastGELU`, in place."""
    for module in model.modules():
        if type(module) in FASTER:
            module.__class__ = FASTER[type(module)]


FASTER = {nn.Linear: FewRowsLinear, nn.GELU: FastGELU}
