"""Trimmed prefill: after the last K and V only the last token goes on. (That its logits are those of
a whole forward pass: `tests/test_equivalence.py`.)"""
import pytest
import torch

from config.gpt_config import GPTConfig
from tests.helpers.models import FULL_STACK, random_model, tokens

KINDS = {
    'full stack': FULL_STACK,
    'gate': dict(FULL_STACK, attn_gate=True),
    'readers last': dict(FULL_STACK, n_layer=12),
    'unshared': dict(FULL_STACK, kv_share='', share_global_kv=False),
    'local last': dict(FULL_STACK, layer_pattern='LG', kv_share='', window_size=3),
    'vanilla': dict(block_size=64, vocab_size=23, n_layer=3, n_head=2, n_embd=16),
}


@pytest.mark.parametrize('kind', KINDS)
@torch.no_grad()
def test_layers_behind_the_last_owner_see_one_token_of_a_row(kind):
    model, seen = random_model(GPTConfig(**KINDS[kind])), []
    for block in model.transformer.h:
        block.mlp.register_forward_hook(lambda module, args, y: seen.append(y.size(1)))
    cache, last = model.new_cache(2, 64), model.plan.last_owner
    model(tokens(2, 20), cache=cache)
    assert seen == [20] * last + [1] * (len(seen) - last)
    assert max(layer.index for layer in model.plan.layers if layer.owns) == last
    seen.clear()
    model(tokens(2, 20), cache=cache, all_logits=True)
    assert set(seen) == {20}
