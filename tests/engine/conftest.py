"""Fixtures of the engine's tests."""
import math

import pytest
import torch

READS = 'tolist', 'item', 'numpy', 'cpu', '__bool__', '__int__', '__float__'


@pytest.fixture
def waits(monkeypatch, recorded):
    """Pretend that tensors are on another device. A list of what would wait for it: reading them,
    copying numbers from memory that is not pinned, and indexing with lists, which does so, too."""
    calls = []
    monkeypatch.setattr('engine.requests.sampler.is_on_cpu', lambda x: False)
    monkeypatch.setattr('engine.requests.sampler.kth_largest', lambda x, k: (
        x.topk(k).values[:, -1:] if 0 < k < x.size(1) else torch.full_like(x[:, :1], -math.inf)))

    def record(owner, name, when):
        def note(*args, **kwargs):
            if when(*args, **kwargs):
                calls.append(name)
        recorded(owner, name, note)

    def with_list(x, index, *value):
        return any(isinstance(i, list) for i in (index if isinstance(index, tuple) else (index,)))

    def blocking_copy(x, *args, non_blocking=False, **kwargs):
        moves = any(isinstance(arg, (torch.device, str)) for arg in (*args, *kwargs.values()))
        return moves and not non_blocking
    for name in READS:
        record(torch.Tensor, name, lambda *args: True)
    for name in ('__getitem__', '__setitem__'):
        record(torch.Tensor, name, with_list)
    record(torch.Tensor, 'to', blocking_copy)
    record(torch, 'tensor', lambda *args, device=None, **kwargs: device is not None)
    return calls


@pytest.fixture
def everywhere(monkeypatch):
    """Capture steps on this device too, where they are simply called."""
    monkeypatch.setattr('engine.steps.captured.suits_capture', lambda model: True)
