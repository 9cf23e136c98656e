"""The device and arithmetic of a run, and the memory it uses."""
import contextlib
import ctypes
import os
import platform
import sys
from typing import NamedTuple

import torch

from common.errors import UserError
from common.sizes import physical_memory


def pick_device(name: str) -> torch.device:
    """Choose a device; 'auto' is CUDA, MPS (untested) or CPU. UserError if it is not available."""
    accelerators = {'cuda': torch.cuda, 'mps': torch.backends.mps}
    usable = [*(name for name, each in accelerators.items() if each.is_available()), 'cpu']
    if name == 'auto':
        return torch.device(usable[0])
    try:
        device = torch.device(name)
        if device.type == 'meta':
            raise ValueError('it holds no numbers')
        torch.empty(0, device=device)
        if device.type == 'cuda' and device.index is not None:
            torch.cuda.set_device(device)  # kernels are launched and graphs captured on it
    except (RuntimeError, AssertionError, ValueError) as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        raise UserError(f"device={name!r} cannot be used here; usable are 'auto', "
                        f'{", ".join(map(repr, usable))} (torch: {reason[:200]})') from e
    return device


def check_seed(seed: int) -> None:
    """Raise UserError if torch's generators do not accept the seed."""
    if not -2 ** 63 <= seed < 2 ** 64:
        raise UserError(f'seed={seed}: must be at least -2**63 and below 2**64')


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Choose a dtype; 'auto' is bfloat16 on CUDA (float16 if unsupported), otherwise float32."""
    if name == 'auto':
        if device.type != 'cuda':
            return torch.float32
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if bf16 else torch.float16
    return getattr(torch, name)


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for matmuls in bfloat16 (AMX, AVX-512 BF16)."""
    names = '_is_amx_tile_supported', '_is_avx512_bf16_supported'
    return any(getattr(torch.cpu, name, bool)() for name in names)


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU, let the allocator of glibc keep what tensors of less than 32 MB free. By default it
    gives a step's activations back to the system, which clears each page again for the next step.
    (Larger tensors would leave gaps.)"""
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None) if sys.platform == 'linux' else None
    if device.type == 'cpu' and mallopt:
        mallopt(-1, -1)        # M_TRIM_THRESHOLD: never
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: the most that it accepts


def autocast(device: torch.device, dtype: torch.dtype):
    """Return a mixed-precision context: matmuls in `dtype`, parameters in float32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device_type=device.type, dtype=dtype)


def total_memory(device: torch.device) -> int:
    """Return bytes of memory, free on a GPU. By default the KV cache uses at most half of it."""
    if device.type == 'cuda':
        return torch.cuda.mem_get_info(device)[0]
    return physical_memory() or 2 ** 35


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or the processor type, for reports."""
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    return f'{device.type} ({platform.machine()})'


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that timings are right."""
    if device.type != 'cpu':
        torch.accelerator.synchronize(device)


class MemoryUse(NamedTuple):
    """Bytes, or None if unknown. peak: the maximum so far. total: the device's capacity."""
    used: int | None
    peak: int | None
    total: int | None


def memory_use(device: torch.device) -> MemoryUse:
    """Return the memory of tensors on a GPU (its allocator reserves more), or of this process."""
    if device.type == 'cuda':
        return MemoryUse(torch.cuda.memory_allocated(device),
                         torch.cuda.max_memory_allocated(device),
                         torch.cuda.mem_get_info(device)[1])
    if device.type == 'mps':
        return MemoryUse(torch.mps.current_allocated_memory(), None,
                         torch.mps.recommended_max_memory())
    used = peak = None
    with contextlib.suppress(OSError), open('/proc/self/statm') as f:  # Linux only
        used = int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')
    with contextlib.suppress(ImportError):  # Windows
        import resource
        unit = 1 if sys.platform == 'darwin' else 1024  # bytes on macOS, kilobytes on Linux
        # Linux updates the peak only now and then: it can be below the current use
        peak = max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, used or 0)
    return MemoryUse(used, peak, physical_memory() or None)
