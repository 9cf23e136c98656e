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
CONFIGS = pytest.mark.parametrize('config', [VANILLA, FULL_STACK, GQA],
                                  ids=['vanilla', 'full stack', 'GQA'])


@CONFIGS
@pytest.mark.parametrize('held', [1, 5, 6, 40])
def test_kv_read_is_what_each_layers_mask_lets_the_new_token_see(config, held):
    plan = plan_kv(GPTConfig(**config))
    keys = sum(int(dense_mask(1, held, layer.window).sum()) for layer in plan.layers)
    per_key = 2 * plan.n_kv_head * plan.head_dim * 4
    assert kv_read_per_step(plan, 'float32', 3, held - 1, 1) == keys * per_key * 3


def test_kv_read_by_hand():
    """LLLLLGL, W=5: six local layers and one global; one K/V head of 6."""
    plan = plan_kv(GPTConfig(**FULL_STACK))
    assert kv_read_per_step(plan, 'int8', 1, 2, 1) == 7 * 3 * 2 * (6 + 2)  # with their scales
    keys = 6 * (4 + 5 + 5 + 5) + 4 + 5 + 6 + 7
    assert kv_read_per_step(plan, 'float32', 1, 3, 4) == keys / 4 * 48


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


# -- sequences within a budget ---------------------------------------------------------------------

MODEL = random_model(GPTConfig(**FULL_STACK), torch.float32)
ONE = MODEL.plan.nbytes(1, 40, 'int8')


@pytest.mark.parametrize('budget, fit', [(ONE, 1), (2 * ONE - 1, 1), (2 * ONE, 2)])
def test_the_largest_batch_that_fits(budget, fit):
    found = most_sequences(MODEL.plan, budget, 40, 'int8')
    assert found == {'sequences': fit, 'kv_bytes': fit * ONE,
                     'kv_bytes_of_one_more': (fit + 1) * ONE}
    with pytest.raises(UserError, match=rf"budget=.* 40 tokens takes {ONE:,} bytes"):
        most_sequences(MODEL.plan, ONE - 1, 40, 'int8')


def test_a_cache_larger_than_the_machine_is_refused():
    model = random_model(GPTConfig(**FULL_STACK), torch.float32)
    with pytest.raises(UserError, match=r'takes \d+\.\d GB, this machine has'):
        setting.make_cache(model, 1, 10 ** 13, 'float32')
    assert setting.make_cache(model, 1, 10, 'float32').max_seq_len == 10
