import importlib.util

import pytest
import torch

from attention.backends import INTERPRETING, triton_enabled

if importlib.util.find_spec('triton') is None:
    collect_ignore_glob = ['test_*.py']


@pytest.fixture(params=['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
def device(request):
    """The device for the kernels: the GPU, or without one the CPU, with Triton's interpreter."""
    if request.param == 'cpu' and not INTERPRETING:
        pytest.skip('interpreted where there is no GPU')
    with triton_enabled(True):
        yield torch.device(request.param)
