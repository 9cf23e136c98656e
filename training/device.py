"""Which device and arithmetic a run uses, and how much of the device's memory."""
import contextlib
import os
import platform
import re
import sys
from dataclasses import dataclass

import torch

from attention.backends import choose
from config.errors import UserError
from config.sizes import physical_memory


def pick_device(name: str) -> torch.device:
    """'auto' is CUDA, else MPS (untested), else CPU. Raises UserError: no such device here."""
    usable = ['cuda'] * torch.cuda.is_available() + ['mps'] * torch.backends.mps.is_available()
    usable.append('cpu')
    if name == 'auto':
        return torch.device(usable[0])
    try:
        device = torch.device(name)
        if device.type == 'meta':
            raise ValueError('it holds no numbers')
        torch.empty(0, device=device)
        if device.type == 'cuda' and device.index is not None:
            torch.cuda.set_device(device)  # where kernels are launched and graphs captured
    except (RuntimeError, AssertionError, ValueError) as e:
        raise UserError(f'device={name!r} cannot be used here{_why_no_cuda(name)}; '
                        "usable are 'auto', " + ', '.join(map(repr, usable))) from e
    return device


def _why_no_cuda(name: str) -> str:
    if not re.fullmatch(r'cuda(:\d+)?', name):
        return ''
    if not torch.backends.cuda.is_built():
        return f', because this torch ({torch.__version__}) was built without CUDA'
    return '' if torch.cuda.device_count() else ', because torch sees no GPU'


def check_seed(seed: int) -> None:
    """Raises UserError for a seed that torch's generators do not take."""
    if not -2 ** 63 <= seed < 2 ** 64:
        raise UserError(f'seed={seed}: must be at least -2**63 and below 2**64')


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """'auto' is bfloat16 on CUDA that has it (float16 on older), float32 elsewhere."""
    if name == 'auto':
        if device.type != 'cuda':
            return torch.float32
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if bf16 else torch.float16
    return getattr(torch, name)


def describe_attention(model, dtype: torch.dtype, dropout_p: float) -> str:
    """'attention: global layers sdpa, local layers flex': what a model's layers will use. Raises
    UserError as `choose`."""
    kinds = sorted({layer.kind for layer in model.plan.layers})
    found = [choose(kind, model.attention_backend, model.device, dtype, model.plan.head_dim,
                    dropout_p) for kind in kinds]
    if 'flash_attn' in found:
        from attention.kernels.flash import load_flash_attn
        load_flash_attn()
    return 'attention: ' + ', '.join(f'{kind} layers {name}' for kind, name in zip(kinds, found))


def autocast(device: torch.device, dtype: torch.dtype):
    """Mixed precision: matmuls in `dtype`, parameters in float32. Nothing for float32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device_type=device.type, dtype=dtype)


def total_memory(device: torch.device) -> int:
    """Bytes of memory, on a GPU those that are free. The KV cache takes at most half by default."""
    if device.type == 'cuda':
        return torch.cuda.mem_get_info(device)[0]
    return physical_memory() or 2 ** 35


def device_name(device: torch.device) -> str:
    """For reports: the GPU's name, or the processor's kind."""
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    return f'{device.type} ({platform.machine()})'


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read next to it is right."""
    if device.type != 'cpu':
        torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class MemoryUse:
    """Bytes, or None where unknown. peak: the most used so far. total: of the device."""
    used: int | None
    peak: int | None
    total: int | None

    @property
    def share(self) -> float | None:
        """The peak as a share of the total."""
        return self.peak / self.total if self.peak and self.total else None


def memory_use(device: torch.device) -> MemoryUse:
    """Memory of the tensors on a GPU (the caching allocator holds more), or of this process."""
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
