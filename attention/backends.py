"""Which kernels can run: Triton's, and those behind torch's SDPA."""
import contextlib
import importlib.util
import os

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HALF = (torch.bfloat16, torch.float16)

# TRITON_INTERPRET=1 makes Triton run its kernels on a CPU, for tests
INTERPRETING = os.environ.get('TRITON_INTERPRET') == '1'
TRITON_INSTALLED = importlib.util.find_spec('triton') is not None
_enabled = None  # see `triton_enabled`


def sdpa_of_any_shape(device: torch.device):
    """A context for SDPA calls whose shapes change, as prompt lengths do: on CUDA, without cuDNN.

    On Hopper torch prefers cuDNN in half precision. It builds a plan for every exact shape, which
    takes the host 23 to 37 ms and is kept forever. (In training the shapes stay the same.)
    """
    if device.type != 'cuda':
        return contextlib.nullcontext()
    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def triton_usable(device: torch.device) -> bool:
    """Whether the Triton kernels can run: on CUDA with Triton installed, or on a CPU, where they
    are interpreted, only inside `triton_enabled(True)`."""
    if device.type == 'cuda':
        return _enabled is not False and TRITON_INSTALLED
    return _enabled is True and INTERPRETING and device.type == 'cpu' and TRITON_INSTALLED


@contextlib.contextmanager
def triton_enabled(on: bool):
    """`with triton_enabled(False):` uses plain torch even where the kernels work, to compare."""
    global _enabled
    before, _enabled = _enabled, on
    try:
        yield
    finally:
        _enabled = before
