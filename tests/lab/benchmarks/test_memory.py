"""Bytes read per step: keys visible in the masks, and weights; sequences within a budget."""
import pytest
import torch

from attention.masks import dense_mask
from config.gpt_config import GPTConfig
from engine.weights.quantize import weight_bytes
from kv.plan import plan_kv
from lab.benchmarks.bandwidth import kv_read_per_step, weight_read_bytes
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


@pytest.mark.parametrize('config', [VANILLA, FULL_STACK], ids=['vanilla', 'full stack'])
def test_weights_read_are_all_but_the_rows_of_wpe_that_are_not_looked_up(config):
    """The output layer reads all of wte, with which it is tied."""
    model = random_model(GPTConfig(**config), torch.float32)
    unread = 0 if model.rotary else 4 * 12 * (16 - 1)
    assert weight_read_bytes(model, 2) == weight_bytes(model) - unread
