import importlib.util

import pytest
import torch

from attention.backends import INTERPRETING, triton_enabled

if importlib.util.find_spec('triton') is None:
    collect_ignore_glob = ['test_*.py']


@pytest.fixture(params=['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
def device(request):
    """Where kernels run: on the GPU, or in Triton's interpreter on machines without one."""
    if request.param == 'cpu' and not INTERPRETING:
        pytest.skip('interpreted where there is no GPU')
    with triton_enabled(True):
        yield torch.device(request.param)
