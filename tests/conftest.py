"""Settings for all tests. Hypothesis is deterministic; HYPOTHESIS_PROFILE=explore tries more, new
examples."""
import importlib.util
import os
import pydoc

# set before importing torch, and for programs that tests start: threads do not help tiny models
os.environ.setdefault('OMP_NUM_THREADS', '1')

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

if not torch.cuda.is_available():  # Triton reads it when it is imported, which torch does late
    os.environ.setdefault('TRITON_INTERPRET', '1')
if importlib.util.find_spec('triton') is None:  # which the kernels' tests import
    collect_ignore = ['attention/kernels']

COMMON = dict(deadline=None, database=None,
              suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.register_profile('default', derandomize=True, **COMMON)
settings.register_profile('explore', max_examples=1000, **COMMON)
settings.load_profile(os.environ.get('HYPOTHESIS_PROFILE', 'default'))


def pytest_collection_modifyitems(config, items):
    """Leave out tests marked `gpu` unless `-m` names them."""
    if 'gpu' not in config.option.markexpr:
        on_gpu = [item for item in items if item.get_closest_marker('gpu')]
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if item not in on_gpu]


def pytest_runtest_logreport(report):
    """End the run where CUDA rejects all work, as it does after an illegal memory access: every
    later test would fail for that reason alone."""
    if report.failed and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as e:
            pytest.exit(f'the device is unusable after {report.nodeid}: {e}', returncode=3)


@pytest.fixture(params=['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
def device(request):
    """The device for kernels: the GPU, or without one the CPU, with Triton's interpreter."""
    from attention.backends import INTERPRETING, triton_enabled
    if request.param == 'cpu' and not INTERPRETING:
        pytest.skip('interpreted where there is no GPU')
    with triton_enabled(True):
        yield torch.device(request.param)


@pytest.fixture(autouse=True)
def no_silent_fallback(request):
    """On a GPU, code that Dynamo recompiles too often is an error instead of running eagerly."""
    if request.node.get_closest_marker('gpu') is None:
        yield
        return
    import torch._dynamo
    torch._dynamo.reset()  # compilations of other tests do not count
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


@pytest.fixture
def recorded(monkeypatch):
    """`recorded(owner, name, note)` returns a list that gets `note(*args)` before each later call
    of the function `owner.name`."""
    def record(owner, name, note):
        notes, plain = [], getattr(owner, name)

        def call(*args, **kwargs):
            notes.append(note(*args, **kwargs))
            return plain(*args, **kwargs)
        monkeypatch.setattr(owner, name, call)
        return notes
    return record


@pytest.fixture
def interrupt(monkeypatch):
    """`interrupt(name, when, error)`: the n-th call of the function with this full name raises the
    error if `when(n)` is 'before' or 'after' (it has run). Returns a list with all n so far."""
    def arm(name, when, error=KeyboardInterrupt):
        owner, _, attribute = name.rpartition('.')
        plain, calls = pydoc.locate(name), []

        def interrupted(*args, **kwargs):
            calls.append(len(calls) + 1)
            moment = when(calls[-1])
            if moment == 'before':
                raise error
            result = plain(*args, **kwargs)
            if moment == 'after':
                raise error
            return result
        monkeypatch.setattr(pydoc.locate(owner), attribute, interrupted)
        return calls
    return arm
