"""Generation through the cache against full forwards in float64: the same tokens, also past windows and context."""
import math

import pytest
import torch

from config.errors import UserError
from engine.dialogue import longest_context
from generate import Generation, Sampler, cache_length, generate, recomputes
from model import GPT, GPTConfig

VANILLA = dict(n_layer=3, n_head=2, n_embd=16, block_size=24, vocab_size=23)
FULL_STACK = dict(n_layer=7, n_head=4, n_embd=24, head_dim=6, n_kv_head=1, block_size=24, vocab_size=23,
                  layer_pattern='LLLLLG', window_size=5, kv_share='AABBBC', share_global_kv=True, pos_embedding='rope',
                  qk_norm=True, rope_theta=100.0)
KINDS = pytest.mark.parametrize('kind', [VANILLA, FULL_STACK], ids=['vanilla', 'full stack'])


def sharp_model(config, seed=0):
    """Weights large enough that one wrong key changes the tokens."""
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
    """nanoGPT's loop, written anew: a full forward per token, cropped to block_size where positions are learned."""
    for _ in range(n):
        seen = idx if model.config.pos_embedding == 'rope' else idx[:, -model.config.block_size:]
        logits = model(seen)[0][:, -1]
        if temperature == 0:
            new = logits.max(dim=-1, keepdim=True).indices
        else:
            logits = logits / temperature
            if top_k:
                kth = logits.sort(descending=True).values[:, [top_k - 1]]
                logits = torch.where(logits < kth, -math.inf, logits)
            p = logits.softmax(-1)
            new = (torch.multinomial(p, 1) if gens is None else
                   torch.stack([torch.multinomial(row, 1, generator=g) for row, g in zip(p, gens)]))
        idx = torch.cat([idx, new], dim=1)
    return idx


def seeded(n):
    return [torch.Generator().manual_seed(k) for k in range(n)]


def cached(model, idx, n, sampler):
    return torch.cat([idx, *Generation(model, idx, n, sampler)], dim=1)


LENGTHS = pytest.mark.parametrize('n_prompt, n_new', [(1, 10), (4, 20), (7, 40), (23, 3), (24, 2), (40, 12)])


@KINDS
@LENGTHS
def test_greedy_tokens_are_those_of_full_forwards(kind, n_prompt, n_new):
    model, idx = sharp_model(kind), prompt(3, n_prompt)
    assert torch.equal(cached(model, idx, n_new, Sampler(0)), uncached(model, idx, n_new, 0))


@KINDS
@LENGTHS
def test_sampled_tokens_are_those_of_full_forwards(kind, n_prompt, n_new):
    model, idx = sharp_model(kind), prompt(3, n_prompt)
    tokens = cached(model, idx, n_new, Sampler(1.3, 8, generators=seeded(3)))
    assert torch.equal(tokens, uncached(model, idx, n_new, 1.3, 8, seeded(3)))
    assert len({tuple(row) for row in tokens[:, n_prompt:].tolist()}) == 3


@KINDS
def test_rows_of_a_batch_are_what_they_are_alone(kind):
    model, idx = sharp_model(kind), prompt(3, 6)
    together = cached(model, idx, 30, Sampler(generators=seeded(3)))
    for k in range(3):
        alone = cached(model, idx[[k]], 30, Sampler(generators=seeded(3)[k:k + 1]))
        assert torch.equal(alone, together[[k]])


def test_learned_positions_past_block_size_are_cropped_and_numbered_anew():
    """Only the last block_size tokens count: whatever came before, what follows is the same."""
    model = sharp_model(VANILLA)
    tail = prompt(1, 24)
    a = torch.cat([prompt(1, 9, seed=3), tail], dim=1)
    b = torch.cat([prompt(1, 30, seed=4), tail], dim=1)
    assert torch.equal(cached(model, a, 9, Sampler(0))[:, -9:], cached(model, b, 9, Sampler(0))[:, -9:])


@KINDS
@pytest.mark.parametrize('temperature, top_k', [(1.0, None), (0.7, 5), (0, None), (1.5, 1000)])
def test_generate_draws_what_nanogpts_loop_draws_from_the_global_generator(kind, temperature, top_k):
    model, idx = sharp_model(kind), prompt(2, 5)
    torch.manual_seed(3)
    tokens = model.generate(idx, 30, temperature=temperature, top_k=top_k)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(tokens, uncached(model, idx, 30, temperature, min(top_k or 0, 23)))
    assert torch.equal(after, torch.get_rng_state())
    assert tokens.shape == (2, 35) and torch.equal(tokens[:, :5], idx)


@pytest.mark.parametrize('training', [True, False])
def test_generate_puts_the_training_mode_back_and_generates_without_dropout(training):
    model = sharp_model(VANILLA | dict(dropout=0.5)).train(training)
    for module in model.modules():
        assert module.training == training
    a, b = (generate(model, prompt(1, 4), 8, 0) for _ in range(2))
    assert torch.equal(a, b) and model.training == training and model.transformer.drop.training == training


def test_generate_puts_the_training_mode_back_when_it_fails():
    model = sharp_model(VANILLA).train()
    with pytest.raises(UserError):
        generate(model, prompt(1, 4)[:, :0], 8)
    assert model.training


@pytest.mark.parametrize('kind, n_new', [(VANILLA, 8), (FULL_STACK, 8), (FULL_STACK, 300)],
                         ids=['vanilla', 'full stack', 'rotary table grown'])
def test_a_model_may_be_trained_after_it_generated(kind, n_new):
    model = sharp_model(kind).train()
    tokens = generate(model, prompt(1, 4), n_new)[:, -20:]
    model(tokens[:, :-1], tokens[:, 1:])[1].backward()
    assert model.lm_head.weight.grad is not None


def test_tokens_come_one_at_a_time_and_no_more_than_asked():
    stream = Generation(sharp_model(FULL_STACK), prompt(2, 3), 4, Sampler(0))
    assert next(stream).shape == (2, 1) and len(list(stream)) == 3


@pytest.mark.parametrize('kind, prompt_length, lengths', [
    (FULL_STACK, 7, [7] + [1] * 9), (VANILLA, 7, [7] + [1] * 9), (VANILLA, 20, [20] + [1] * 4 + [24] * 5),
    (VANILLA, 30, [24] * 10)])
def test_the_model_is_fed_the_prompt_once_and_then_a_token_at_a_time(kind, prompt_length, lengths, monkeypatch):
    fed, plain = [], GPT.forward

    def forward(self, idx, **kw):
        fed.append(idx.size(1))
        return plain(self, idx, **kw)
    monkeypatch.setattr(GPT, 'forward', forward)
    list(Generation(sharp_model(kind), prompt(1, prompt_length), 10, Sampler(0)))
    assert fed == lengths


def test_cache_lengths_end_at_block_size_with_learned_positions_only():
    vanilla, full = sharp_model(VANILLA), sharp_model(FULL_STACK)
    assert [cache_length(vanilla, 10, n) for n in (5, 14, 15, 99)] == [15, 24, 24, 24]
    assert cache_length(full, 10, 99) == 109


def test_recomputation_begins_with_the_first_token_past_block_size():
    vanilla, full = sharp_model(VANILLA), sharp_model(FULL_STACK)
    assert [recomputes(vanilla, 10, n) for n in (14, 15, 16)] == [False, False, True]
    assert not recomputes(full, 10, 99)


def test_an_empty_prompt_is_refused():
    with pytest.raises(UserError, match='no tokens'):
        list(Generation(sharp_model(FULL_STACK), prompt(1, 3)[:, :0], 4, Sampler(0)))


@pytest.mark.parametrize('block_size, more, wanted', [
    (256, dict(layer_pattern='LLG', window_size=64, pos_embedding='rope'), 8192), (1024, dict(
        layer_pattern='LLG', window_size=64, pos_embedding='rope'), 8192),
    (16384, dict(layer_pattern='LLG', window_size=64, pos_embedding='rope'), 16384),
    (64, dict(layer_pattern='LLG', window_size=64, pos_embedding='rope'), 2048),
    (256, dict(pos_embedding='rope'), 256), (256, dict(layer_pattern='LLG', window_size=64), 256)])
def test_longest_context(block_size, more, wanted):
    assert longest_context(GPTConfig(block_size=block_size, **more)) == wanted
