"""Bytes read per step: the arithmetic against the rows actually read (found by setting them to NaN)
and the keys visible in the masks; sequences within a budget."""

import pytest
import torch

from attention.masks import dense_mask
from config.errors import UserError
from config.gpt_config import GPTConfig
from engine.weights.quantize import weight_bytes
from kv.plan import plan_kv
from lab.benchmarks import setting
from lab.benchmarks.bandwidth import kv_read_per_step, most_sequences, weight_read_bytes
from tests.helpers.models import FULL_STACK, VOCAB, random_model

VANILLA = dict(n_layer=2, n_head=2, n_embd=12, block_size=16, vocab_size=VOCAB)
GQA = dict(FULL_STACK, n_kv_head=2, kv_share='')


@pytest.mark.parametrize('config', [VANILLA, FULL_STACK, GQA], ids=['vanilla', 'full', 'GQA'])
def test_kv_read_is_what_each_layers_mask_lets_the_new_tokens_see(config):
    plan = plan_kv(GPTConfig(**config))
    keys = {held: sum(int(dense_mask(1, held, layer.window).sum()) for layer in plan.layers)
            for held in range(1, 12)}
    elements = 2 * plan.n_kv_head * plan.head_dim
    for held in (1, 5, 6, 9):
        found = kv_read_per_step(plan, 'float32', 3, held - 1, 1)
        assert found == keys[held] * elements * 4 * 3
        mean = (keys[held] + keys[held + 1]) / 2
        scales = 2 * plan.n_kv_head * 2
        assert kv_read_per_step(plan, 'int8', 1, held - 1, 2) == mean * (elements + scales)


def really_read(model, batch, held) -> int:
    """Bytes of the parameters that the logits of a step depend on, found by setting them to NaN:
    embeddings row by row, for other parameters only the first and the last row."""
    cache, idx = model.new_cache(batch, held + 1), torch.arange(batch)[:, None] + 3
    total = 0
    with torch.no_grad():
        for p in model.parameters():
            embeddings = p.size(0) in (VOCAB, model.config.block_size)
            rows = range(p.size(0)) if embeddings else (0, p.size(0) - 1)
            shown = [poisoned(model, p, row, idx, cache.fill_(held)) for row in rows]
            assert len(shown) > 2 or all(shown) or not any(shown)
            total += p[0].nbytes * (sum(shown) if len(shown) > 2 else p.size(0) * all(shown))
            cache.reset()
    return total


def poisoned(model, p, row, idx, cache) -> bool:
    kept = p[row].clone()
    p[row] = torch.nan
    shows = model(idx, cache=cache)[0].isnan().any()
    p[row] = kept
    return bool(shows)


@pytest.mark.parametrize('config', [VANILLA, FULL_STACK], ids=['vanilla', 'full stack'])
def test_weights_read_are_those_that_a_step_cannot_do_without(config):
    model = random_model(GPTConfig(**config), torch.float32)
    assert really_read(model, 2, 7) == weight_read_bytes(model, 2)
    # one of wpe's 16 rows
    assert (weight_read_bytes(model, 2) < weight_bytes(model)) == (model.rotary is None)


def test_the_largest_batch_that_fits():
    plan = plan_kv(GPTConfig(**FULL_STACK))
    one = plan.nbytes(1, 40, 'int8')
    for budget, fit in ((one, 1), (2 * one - 1, 1), (2 * one, 2)):
        assert most_sequences(plan, budget, 40, 'int8') == {
            'sequences': fit, 'kv_bytes': fit * one, 'kv_bytes_of_one_more': (fit + 1) * one}
    with pytest.raises(UserError, match=rf"budget=.* 40 tokens takes {one:,} bytes"):
        most_sequences(plan, one - 1, 40, 'int8')
    model = random_model(GPTConfig(**FULL_STACK), torch.float32)
    with pytest.raises(UserError, match=r'takes \d+\.\d GB, this machine has'):
        setting.make_cache(model, 1, 10 ** 13, 'float32')
    assert setting.make_cache(model, 1, 10, 'float32').max_seq_len == 10
