"""Trimmed prefill, only the last token after the last K and V: same logits, same slots."""
import pytest
import torch

from config.gpt_config import GPTConfig
from engine.pages.cache import PagedKVCache
from tests.helpers.models import FULL_STACK, random_model, tokens

KINDS = {
    'full stack': FULL_STACK,
    'gate': dict(FULL_STACK, attn_gate=True),
    'readers last': dict(FULL_STACK, n_layer=12),
    'unshared': dict(FULL_STACK, kv_share='', share_global_kv=False),
    'local last': dict(FULL_STACK, layer_pattern='LG', kv_share='', window_size=3),
    'vanilla': dict(block_size=64, vocab_size=23, n_layer=3, n_head=2, n_embd=16),
}


PAGED = dict(cache_class=PagedKVCache, n_pages=60, page_size=4)


@pytest.mark.parametrize('paging, kv_dtype', [({}, 'auto'), ({}, 'int8'), (PAGED, 'auto')],
                         ids=['contiguous', 'int8', 'paged'])
@pytest.mark.parametrize('lens', [None, [2, 9, 0]], ids=['even', 'ragged'])
@pytest.mark.parametrize('kind', KINDS)
@torch.no_grad()
def test_logits_and_slots_equal_those_of_whole_prefill(kind, lens, kv_dtype, paging):
    model = random_model(GPTConfig(**KINDS[kind]))
    trimmed, whole = (model.new_cache(3, 64, kv_dtype, **paging) for _ in range(2))
    for k in range(4):  # beyond the window; later chunks attend to cached keys
        idx = tokens(3, 9, seed=k)
        logits = model(idx, cache=trimmed, lens=lens)[0]
        every = model(idx, cache=whole, lens=lens, all_logits=True)[0]
        for row, n in enumerate(lens or [9] * 3):
            if n:
                assert (logits[row, 0] - every[row, n - 1]).abs().max() < 1e-12
        for a, b in zip(trimmed.stores, whole.stores):
            assert all(torch.equal(x, y) for x, y in zip(a.tensors, b.tensors))


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
