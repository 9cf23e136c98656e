"""Tests of the benchmarks copy little memory."""
import pytest

from lab.benchmarks import bandwidth


@pytest.fixture(autouse=True)
def _small_buffer(monkeypatch):
    monkeypatch.setattr(bandwidth, 'BUFFER_BYTES', 2 ** 20)
