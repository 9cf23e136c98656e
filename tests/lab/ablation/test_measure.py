"""Evaluating trained weights with the row's cache, converted according to the row."""
import dataclasses

import numpy as np
import pytest
import torch

from config.errors import UserError
from data.recall.tasks import LagTask
from data.tokenizer import CharTokenizer
from kv.cache import KVCache
from lab.ablation import lookup, measure
from model import GPT

ALPHABET = 'abcdefghijklm'
TOKENIZER = CharTokenizer({c: i for i, c in enumerate(ALPHABET)}, dict(enumerate(ALPHABET)))
WINDOWS = torch.randint(len(ALPHABET), (6, 65), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def ladder(ladder_of):
    return ladder_of()


@pytest.fixture
def saved(ladder):
    """A checkpoint of row '+ windows'."""
    torch.manual_seed(0)
    config = ladder.trained_config(ladder.rows['+ windows'])
    model = GPT(config)
    for p in model.parameters():
        p.data.mul_(4)
    return {'model': model.state_dict(), 'model_args': vars(config)}


def test_a_row_is_judged_through_a_cache_of_its_own_storage(ladder, saved):
    row = ladder.rows['+ windows']
    model = measure.trained_model(ladder, row, saved, 'ckpt.pt')
    plain, int8, half = (
        measure.losses(model, dataclasses.replace(row, kv_dtype=kv_dtype), WINDOWS, TOKENIZER)[0]
        for kv_dtype in ('auto', 'int8', 'bfloat16'))
    assert plain['cache_minus_forward_largest'] < 1e-5
    assert plain['val_loss'] == pytest.approx(plain['val_loss_forward'], abs=1e-6)
    assert int8['cache_minus_forward_largest'] < 1e-3
    assert 0 < abs(int8['val_loss'] - plain['val_loss']) < 0.02
    assert 0 < half['cache_minus_forward_largest'] < 0.1
    assert plain['bytes'] == plain['tokens'] == 6 * 64
    assert plain['bits_per_byte'] == pytest.approx(plain['val_loss'] / np.log(2))


@pytest.mark.parametrize('kv_dtype', ['auto', 'int8'])
def test_a_cache_that_gives_other_losses_is_an_error(kv_dtype, ladder, saved, monkeypatch):
    row = dataclasses.replace(ladder.rows['+ windows'], kv_dtype=kv_dtype)
    model = measure.trained_model(ladder, row, saved, 'ckpt.pt')
    commit = KVCache.commit

    def forgetful(cache, *args, **kwargs):
        commit(cache, *args, **kwargs)
        cache.stores[0].zero_values(list(range(cache.batch_size)), int(cache.lengths.max()))
    monkeypatch.setattr(KVCache, 'commit', forgetful)
    with pytest.raises(RuntimeError, match='is not that of the forward pass'):
        measure.losses(model, row, WINDOWS, TOKENIZER)


def test_a_row_that_changes_at_inference_gets_converted_weights(ladder, saved):
    with pytest.raises(UserError, match='another model than row .*MQA'):
        measure.trained_model(ladder, ladder.rows['+ MQA'], saved, 'ckpt.pt')
    plain = measure.trained_model(ladder, ladder.rows['+ windows'], saved, 'ckpt.pt')
    tied = measure.trained_model(ladder, ladder.rows['tied later'], saved, 'ckpt.pt')
    assert len(tied.plan.slots) == 2 and len(plain.plan.slots) == 3
    name = 'transformer.h.1.attn.c_attn.weight'
    assert torch.equal(tied.state_dict()[name], plain.state_dict()[name][:32])


@pytest.mark.parametrize('right_at', [(7, 20), (20,), ()])
def test_recall_counts_what_is_asked_alone(ladder, saved, monkeypatch, right_at):
    """A model that predicts the right token always, never, or at only one distance."""
    model = measure.trained_model(ladder, ladder.rows['+ windows'], saved, 'ckpt.pt')
    task = LagTask(64, (7, 20))

    def logits_of(idx):
        out = torch.zeros(*idx.shape, task.vocab_size)
        for distance in right_at:
            if (idx == 64 + task.distances.index(distance)).any(1).all():
                out.scatter_(2, torch.roll(idx, distance, dims=1)[..., None], 1.0)
        return out
    monkeypatch.setattr(lookup, 'through_cache', lambda *args: logits_of)
    found = lookup.recall(model, 'float32', task, rows=32)
    assert found['local_reach'] == 2 * 7 and list(found['accuracy']) == [7, 20]
    for distance, share in found['accuracy'].items():
        assert share == 1.0 if distance in right_at else share < 0.05
