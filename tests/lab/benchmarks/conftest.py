"""A clock that only moves when a test advances it."""
from types import SimpleNamespace

import pytest

from lab.benchmarks import bandwidth, clock


@pytest.fixture
def fake_clock(monkeypatch):
    """The clock that the benchmarks read; `fake_clock.time` is in seconds."""
    fake = SimpleNamespace(time=0.0)
    monkeypatch.setattr(clock, 'now', lambda: fake.time)
    return fake


@pytest.fixture(autouse=True)
def _small_buffer(monkeypatch):
    monkeypatch.setattr(bandwidth, 'BUFFER_BYTES', 2 ** 20)
