"""A clock that stands still unless a test moves it."""
from types import SimpleNamespace

import pytest

from lab.benchmarks import bandwidth, clock


@pytest.fixture
def fake_clock(monkeypatch):
    """`fake_clock.time` in seconds; what the benchmarks read."""
    fake = SimpleNamespace(time=0.0)
    monkeypatch.setattr(clock, 'now', lambda: fake.time)
    return fake


@pytest.fixture(autouse=True)
def _small_buffer(monkeypatch):
    monkeypatch.setattr(bandwidth, 'BUFFER_BYTES', 2 ** 20)
