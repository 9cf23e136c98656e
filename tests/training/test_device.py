"""The note about matmuls that do not use what the processor has."""
import ctypes
from pathlib import Path

import pytest
import torch

from training.device import slow_matmuls

AMD, INTEL = 'vendor_id : AuthenticAMD\nflags : avx2 avx512f', 'vendor_id : GenuineIntel\navx512f'
CPU, F32 = torch.device('cpu'), torch.float32


@pytest.mark.parametrize('cpu, device, dtype, overridden, noted', [
    (AMD, CPU, F32, False, True), (AMD, CPU, F32, True, False), (INTEL, CPU, F32, False, False),
    (AMD.replace('avx512f', ''), CPU, F32, False, False),
    (AMD, torch.device('cuda'), F32, False, False), (AMD, CPU, torch.bfloat16, False, False),
    (None, CPU, F32, False, False)])
def test_matmuls_that_mkl_slows_down(monkeypatch, cpu, device, dtype, overridden, noted):
    def read_text(path, **how):
        assert str(path) == '/proc/cpuinfo'
        if cpu is None:
            raise FileNotFoundError
        return cpu

    class Preloaded:
        mkl_serv_intel_cpu_true = None
    monkeypatch.setattr(Path, 'read_text', read_text)
    monkeypatch.setattr(torch.backends.mkl, 'is_available', lambda: True)
    monkeypatch.setattr(ctypes, 'CDLL', lambda name: Preloaded() if overridden else object())
    assert ('twice as fast' in slow_matmuls(device, dtype)) == noted
