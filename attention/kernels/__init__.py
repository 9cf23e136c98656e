"""Triton kernels, and whether they can run here. Each has a twin in plain torch, which serves everywhere else."""
import contextlib
import importlib.util
import os

import torch

INTERPRETING = os.environ.get('TRITON_INTERPRET') == '1'  # Triton's own interpreter, which runs kernels on a CPU: for tests
TRITON_INSTALLED = importlib.util.find_spec('triton') is not None  # here, because a compiled step cannot trace the look-up
_wanted = None  # see `wanted`


def usable(device: torch.device) -> bool:
    """Whether the kernels serve on this device: CUDA, where Triton is installed. (On a CPU, where they are interpreted, only
    inside of `wanted(True)`.)"""
    if device.type == 'cuda':
        return _wanted is not False and TRITON_INSTALLED
    return _wanted is True and INTERPRETING and device.type == 'cpu' and TRITON_INSTALLED


@contextlib.contextmanager
def wanted(on: bool):
    """`with wanted(False):` the plain torch forms serve also where the kernels would: to compare the two."""
    global _wanted
    before, _wanted = _wanted, on
    try:
        yield
    finally:
        _wanted = before
