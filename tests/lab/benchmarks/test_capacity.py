"""Sequences within a budget are counted from allocated caches."""
from types import SimpleNamespace

import pytest
import torch

from config.errors import UserError
from config.gpt_config import GPTConfig
from lab.benchmarks import setting
from lab.benchmarks.capacity import most_sequences
from tests.helpers.models import FULL_STACK, random_model

MODEL = random_model(GPTConfig(**FULL_STACK), torch.float32)
ONE = MODEL.plan.nbytes(1, 40, 'int8')


@pytest.mark.parametrize('budget, fit', [(ONE, 1), (2 * ONE - 1, 1), (2 * ONE, 2), (10 * ONE + 1, 10)])
def test_the_largest_batch_that_fits(budget, fit):
    found = most_sequences(MODEL, budget, 40, 'int8', 'text')
    assert found == {'sequences': fit, 'kv_bytes': fit * ONE, 'kv_bytes_of_one_more': (fit + 1) * ONE}


@pytest.mark.parametrize('really, fit', [(150, 6), (100, 10), (50, 20)])
def test_what_is_allocated_counts_and_not_the_plan(really, fit):
    plan = SimpleNamespace(nbytes=lambda batch, *_: 100 * batch)
    model = SimpleNamespace(plan=plan, device=torch.device('cpu'), resolved_kv_dtype=lambda kv_dtype: 'float32',
                            new_cache=lambda batch, *_: SimpleNamespace(nbytes=really * batch, kv_dtype='float32'))
    assert most_sequences(model, 1000, 40, 'auto', '1kB')['sequences'] == fit


def test_not_even_one():
    with pytest.raises(UserError, match=rf"budget='1B'.* 40 tokens takes {ONE:,} bytes"):
        most_sequences(MODEL, ONE - 1, 40, 'int8', '1B')


def test_a_cache_larger_than_the_machine_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(setting, 'physical_memory', lambda: ONE)
    with pytest.raises(UserError, match='2 x 40 tokens.*this machine has'):
        setting.make_cache(MODEL, 2, 40, 'int8')
    assert setting.make_cache(MODEL, 1, 40, 'int8').nbytes == ONE
