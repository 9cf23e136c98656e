"""Cached generation gives the same tokens as full forwards in float64, even beyond windows and
context."""
import math

import pytest
import torch

from config.errors import UserError
from engine.text.dialogue import longest_context
from generate import cache_length, generate
from model import GPTConfig
from tests.helpers import models
from tests.helpers.models import VOCAB, random_model, tokens

VANILLA = dict(n_layer=3, n_head=2, n_embd=16, block_size=24, vocab_size=VOCAB)
FULL_STACK = models.FULL_STACK | dict(block_size=24)
KINDS = pytest.mark.parametrize('kind', [VANILLA, FULL_STACK], ids=['vanilla', 'full stack'])


def sharp_model(config):
    return random_model(GPTConfig(**config))


@torch.no_grad()
def uncached(model, idx, n, temperature=1.0, top_k=0, generator=None):
    """nanoGPT's loop: a full forward per token, cropped to block_size if positions are learned."""
    for _ in range(n):
        rope = model.config.pos_embedding == 'rope'
        logits = model(idx if rope else idx[:, -model.config.block_size:])[0][:, -1]
        if temperature == 0:
            new = logits.max(dim=-1, keepdim=True).indices
        else:
            logits = logits / temperature
            if top_k:
                kth = logits.sort(descending=True).values[:, [top_k - 1]]
                logits = torch.where(logits < kth, -math.inf, logits)
            new = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        idx = torch.cat([idx, new], dim=1)
    return idx


@KINDS
@pytest.mark.parametrize('temperature, top_k', [(1.0, None), (0.7, 5), (0, None), (1.5, 1000)])
def test_generate_draws_what_nanogpt_draws_from_the_global_generator(kind, temperature, top_k):
    model, idx = sharp_model(kind), tokens(2, 5)
    torch.manual_seed(3)
    found = model.generate(idx, 30, temperature=temperature, top_k=top_k)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(found, uncached(model, idx, 30, temperature, min(top_k or 0, 23)))
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize('training', [True, False])
def test_generate_puts_the_training_mode_back_and_generates_without_dropout(training):
    model = sharp_model(VANILLA | dict(dropout=0.5)).train(training)
    a, b = (generate(model, tokens(1, 4), 8, 0) for _ in range(2))
    assert torch.equal(a, b) and model.training == model.transformer.drop.training == training
    with pytest.raises(UserError, match='no tokens'):
        generate(model, tokens(1, 0), 8)
    assert model.training == training


@pytest.mark.parametrize('kind, n_new', [(VANILLA, 8), (FULL_STACK, 300)],
                         ids=['vanilla', 'rotary table grown'])
def test_a_model_may_be_trained_after_it_generated(kind, n_new):
    model = sharp_model(kind).train()
    idx = generate(model, tokens(1, 4), n_new)[:, -20:]
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    assert model.lm_head.weight.grad is not None


def test_block_size_bounds_the_cache_with_learned_positions_only():
    vanilla, full = sharp_model(VANILLA), sharp_model(FULL_STACK)
    assert [cache_length(vanilla, 10, n) for n in (5, 14, 15, 99)] == [15, 24, 24, 24]
    assert cache_length(full, 10, 99) == 109


@pytest.mark.parametrize('block_size, rope, local, expected', [
    (256, True, True, 8192), (16384, True, True, 16384), (64, True, True, 2048),
    (256, True, False, 256), (256, False, True, 256)])
def test_longest_context(block_size, rope, local, expected):
    fields = dict(pos_embedding='rope') if rope else {}
    fields |= dict(layer_pattern='LLG', window_size=64) if local else {}
    assert longest_context(GPTConfig(block_size=block_size, **fields)) == expected
