"""Cached generation gives the same tokens as full forwards in float64, even beyond windows and
context."""
import math

import pytest
import torch

from config.errors import UserError
from engine.text.dialogue import longest_context
from generate import Generation, Sampler, cache_length, generate
from model import GPT, GPTConfig

VANILLA = dict(n_layer=3, n_head=2, n_embd=16, block_size=24, vocab_size=23)
FULL_STACK = dict(n_layer=7, n_head=4, n_embd=24, head_dim=6, n_kv_head=1, block_size=24,
                  vocab_size=23, layer_pattern='LLLLLG', window_size=5, kv_share='AABBBC',
                  share_global_kv=True, pos_embedding='rope', qk_norm=True, rope_theta=100.0)
KINDS = pytest.mark.parametrize('kind', [VANILLA, FULL_STACK], ids=['vanilla', 'full stack'])


def sharp_model(config, seed=0):
    """A model with weights so large that a single wrong key changes the tokens."""
    model = GPT(GPTConfig(**config)).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(0.4 * noise if p.dim() > 1 else 1 + 0.3 * noise)
    return model


def prompt(rows, t, seed=1):
    return torch.randint(23, (rows, t), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def uncached(model, idx, n, temperature=1.0, top_k=0, gens=None):
    """nanoGPT's loop: a full forward per token, cropped to block_size if positions are learned.
    """
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
            p = logits.softmax(-1)
            if gens is None:
                new = torch.multinomial(p, 1)
            else:
                rows = zip(p, gens)
                new = torch.stack([torch.multinomial(row, 1, generator=g) for row, g in rows])
        idx = torch.cat([idx, new], dim=1)
    return idx


def seeded(n):
    return [torch.Generator().manual_seed(k) for k in range(n)]


@KINDS
@pytest.mark.parametrize('n_prompt, n_new', [(1, 10), (7, 40), (23, 3), (40, 12)])
@pytest.mark.parametrize('sampler', [(0, 0), (1.3, 8)], ids=['greedy', 'sampled'])
def test_tokens_are_those_of_full_forwards(kind, n_prompt, n_new, sampler):
    model, idx = sharp_model(kind), prompt(3, n_prompt)
    made = list(Generation(model, idx, n_new, Sampler(*sampler, generators=seeded(3))))
    assert [new.shape for new in made] == [(3, 1)] * n_new
    assert torch.equal(torch.cat([idx, *made], 1), uncached(model, idx, n_new, *sampler, seeded(3)))


@KINDS
@pytest.mark.parametrize('temperature, top_k', [(1.0, None), (0.7, 5), (0, None), (1.5, 1000)])
def test_generate_draws_what_nanogpt_draws_from_the_global_generator(kind, temperature, top_k):
    model, idx = sharp_model(kind), prompt(2, 5)
    torch.manual_seed(3)
    tokens = model.generate(idx, 30, temperature=temperature, top_k=top_k)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(tokens, uncached(model, idx, 30, temperature, min(top_k or 0, 23)))
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize('training', [True, False])
def test_generate_puts_the_training_mode_back_and_generates_without_dropout(training):
    model = sharp_model(VANILLA | dict(dropout=0.5)).train(training)
    a, b = (generate(model, prompt(1, 4), 8, 0) for _ in range(2))
    assert torch.equal(a, b) and model.training == model.transformer.drop.training == training
    with pytest.raises(UserError, match='no tokens'):
        generate(model, prompt(1, 0), 8)
    assert model.training == training


@pytest.mark.parametrize('kind, n_new', [(VANILLA, 8), (FULL_STACK, 300)],
                         ids=['vanilla', 'rotary table grown'])
def test_a_model_may_be_trained_after_it_generated(kind, n_new):
    model = sharp_model(kind).train()
    tokens = generate(model, prompt(1, 4), n_new)[:, -20:]
    model(tokens[:, :-1], tokens[:, 1:])[1].backward()
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
