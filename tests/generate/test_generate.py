"""Cached generation gives the same tokens as full forwards in float64, even beyond windows and
context; in a batch, each prompt gets the tokens that it would get by itself."""
import math

import pytest
import torch

from common.errors import UserError
from engine.requests.sampler import TopPSampler, sample_generators
from engine.text.dialogue import longest_context
from generate import Generation, Sampler, cache_length, draw_without_waiting, generate
from model import GPT, GPTConfig
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
    assert [cache_length(vanilla.config, 10, n) for n in (5, 14, 15, 99)] == [15, 24, 24, 24]
    assert cache_length(full.config, 10, 99) == 109


@pytest.mark.parametrize('block_size, rope, local, expected', [
    (256, True, True, 8192), (16384, True, True, 16384), (64, True, True, 2048),
    (256, True, False, 256), (256, False, True, 256)])
def test_longest_context(block_size, rope, local, expected):
    fields = dict(pos_embedding='rope') if rope else {}
    fields |= dict(layer_pattern='LLG', window_size=64) if local else {}
    assert longest_context(GPTConfig(block_size=block_size, **fields)) == expected


# -- prompts of different lengths ------------------------------------------------------------------

def prompts_of(lengths):
    return [tokens(1, n, seed=k)[0] for k, n in enumerate(lengths)]


def seeded(n):
    return [torch.Generator().manual_seed(k) for k in range(n)]


def alone(model, prompts, n, sampler):
    """(B, n) tokens from full forwards, each prompt by itself; `sampler`: (temperature, top_k)."""
    rows = []
    for p, generator in zip(prompts, seeded(len(prompts))):
        rows.append(uncached(model, p[None], n, *sampler, generator)[:, p.numel():])
    return torch.cat(rows)


@KINDS
@pytest.mark.parametrize('lengths', [(1, 9, 4), (2, 30, 11), (23, 24, 25)], ids=str)
@pytest.mark.parametrize('sampler', [(0, 0), (1.3, 8)], ids=['greedy', 'sampled'])
def test_each_prompt_gets_the_tokens_it_gets_alone(kind, lengths, sampler):
    model, prompts = sharp_model(kind), prompts_of(lengths)
    made = Generation(model, prompts, 30, Sampler(*sampler, generators=seeded(len(prompts))))
    assert torch.equal(torch.cat(list(made), dim=1), alone(model, prompts, 30, sampler))


def test_only_rows_past_block_size_are_recomputed_and_no_finished_ones(recorded):
    """Records (shape, lens) of each forward pass: passes with lens use the cache."""
    def note(self, idx, **kw):
        assert ('cache' in kw) == ('lens' in kw)
        return tuple(idx.shape), kw.get('lens')
    fed, model = recorded(GPT, 'forward', note), sharp_model(VANILLA)
    list(Generation(model, prompts_of((30, 22, 3, 23)), 5, Sampler(0)))
    assert fed == [((4, 23), [0, 22, 3, 23]), ((1, 24), None),
                   ((4, 1), [0, 1, 1, 1]), ((1, 24), None),
                   ((4, 1), [0, 1, 1, 0]), ((2, 24), None),
                   ((4, 1), [0, 0, 1, 0]), ((3, 24), None),
                   ((4, 1), [0, 0, 1, 0]), ((3, 24), None)]
    fed.clear()
    generation = Generation(model, prompts_of((30, 40, 24)), 4, Sampler(0))
    for k, _ in enumerate(generation):
        generation.finish(k)
    assert [shape for shape, _ in fed] == [(3, 24), (2, 24), (2, 24), (1, 24)]


# -- finished rows ---------------------------------------------------------------------------------

def until_stop(rows, stop_tokens):
    """The rows up to their first stop token; shorter ones are padded with it."""
    cut = []
    for row in rows:
        ends = [i for i, token in enumerate(row) if token in stop_tokens]
        cut.append(row[:ends[0] + 1] if ends else row)
    longest = max(map(len, cut))
    return [row + row[-1:] * (longest - len(row)) for row in cut]


@KINDS
@pytest.mark.parametrize('lengths', [(4, 4, 4, 4), (1, 20, 25, 9)], ids=str)
@pytest.mark.parametrize('stop_tokens', [(5,), (5, 7, 11), range(23)],
                         ids=['one', 'several', 'any'])
def test_a_row_ends_on_its_first_stop_token_and_the_others_go_on(kind, lengths, stop_tokens):
    model, prompts = sharp_model(kind), prompts_of(lengths)
    expected = until_stop(alone(model, prompts, 25, (1.0, 0)).tolist(), stop_tokens)
    sampler = Sampler(generators=seeded(4))
    generation = Generation(model, prompts, 25, sampler, stop_tokens=stop_tokens)
    assert torch.cat(list(generation), dim=1).tolist() == expected
    assert generation.finished == [row[-1] in stop_tokens for row in expected]


def test_generate_with_stop_tokens():
    model, idx = sharp_model(FULL_STACK), tokens(3, 5)
    torch.manual_seed(3)
    whole = model.generate(idx, 40)[:, 5:].tolist()
    torch.manual_seed(3)
    found = model.generate(idx, 40, stop_tokens=(2, 9))
    assert found[:, 5:].tolist() == until_stop(whole, (2, 9)) and found.size(1) < 45


@KINDS
@pytest.mark.parametrize('stop_tokens', [False, True])
def test_rows_may_be_finished_from_outside(kind, stop_tokens):
    """At once, later, and all: the stream ends with the last row, and other rows are unaffected."""
    model, prompts = sharp_model(kind), prompts_of((4, 23, 2))
    whole = alone(model, prompts, 20, (0, 0))
    unseen = set(range(23)) - set(torch.cat([whole.flatten(), *prompts]).tolist())
    assert unseen
    generation = Generation(model, prompts, 20, Sampler(0),
                            stop_tokens=unseen if stop_tokens else ())
    generation.finish(2)
    made = []
    for k, new in enumerate(generation):
        made.append(new)
        if k in (3, 8):
            generation.finish(1 if k == 3 else 0)
    found = torch.cat(made, dim=1)
    assert found.shape == (3, 9) and torch.equal(found[0], whole[0, :9])
    assert found[1].tolist() == whole[1, :4].tolist() + [whole[1, 3]] * 5
    assert found[2].tolist() == [prompts[2][-1]] * 9
    assert generation.finished == [True] * 3


@pytest.mark.parametrize('prompts, stop_tokens, named', [
    ([], (), 'at least one'), ([[1], []], (), r'\(1\) has no tokens'),
    ([[]], (), 'the prompt has no tokens'), ([1, 2], (), r'shape \(\)'),
    (torch.zeros(0, 4, dtype=torch.int64), (), 'at least one'),
    ([[1]], (1, -1), '-1.*0 to 22'), ([[1]], (1, 23), '23.*0 to 22')])
def test_wrong_input_is_refused(prompts, stop_tokens, named):
    with pytest.raises(UserError, match=named):
        Generation(sharp_model(VANILLA), prompts, 3, Sampler(0), stop_tokens=stop_tokens)


# -- which tokens a sampler draws, how often, and with which random numbers ------------------------

CPU = torch.device('cpu')
PROBS = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
DRAWS = 20_000


def draws(sampler, logits):
    torch.manual_seed(0)
    return sampler(logits.expand(DRAWS, -1)).squeeze(1)


@pytest.mark.parametrize('settings, probs',
                         [(dict(temperature=t), PROBS ** (1 / t)) for t in (0.5, 1.0, 2.0)]
                         + [(dict(top_k=2), [0.4, 0.3, 0, 0, 0]), (dict(top_k=5), PROBS),
                            (dict(top_p=0.65), [0.4, 0.3, 0, 0, 0]),
                            # the first token has 4/7 > 0.5 of the top two
                            (dict(top_p=0.5, top_k=2), [0.4, 0, 0, 0, 0])])
def test_draws_follow_the_distribution(settings, probs):
    """Within 4.5 standard deviations of a binomial (the seed is fixed: the test is not flaky)."""
    frequency = torch.bincount(draws(TopPSampler(**settings), PROBS.log()), minlength=5) / DRAWS
    p = torch.as_tensor(probs) / torch.as_tensor(probs).sum()
    assert ((frequency - p).abs() <= 4.5 * (p * (1 - p) / DRAWS).sqrt()).all()


# -- generators ------------------------------------------------------------------------------------

def generators(first, count, seed=5):
    torch.manual_seed(seed)
    return sample_generators(seed, first + count, CPU)[first:]


def test_sample_0_goes_on_where_the_global_generator_stands():
    torch.manual_seed(5)
    torch.randn(100)  # as building a model does
    gens = sample_generators(5, 2, CPU)
    assert torch.equal(gens[0].get_state(), torch.get_rng_state())
    samplers, logits = (TopPSampler(generators=gens[:1]), TopPSampler()), torch.linspace(0, 1, 9)
    assert torch.equal(*(torch.cat([sampler(logits[None]) for _ in range(20)])
                         for sampler in samplers))


def test_later_samples_depend_on_seed_and_index_alone():
    a = generators(1, 3)
    torch.randn(50)
    b = sample_generators(5, 4, CPU)[1:]
    assert all(torch.equal(x.get_state(), y.get_state()) for x, y in zip(a, b))
    states = {bytes(g.get_state().numpy()) for seed in (5, -1) for g in generators(1, 3, seed)}
    assert len(states) == 6


def test_the_draw_that_does_not_wait_equals_multinomial():
    probs = torch.rand(5, 100, generator=torch.Generator().manual_seed(0)).softmax(-1)
    for seed in range(20):
        generators = [torch.Generator().manual_seed(seed) for _ in 'ab']
        expected = torch.multinomial(probs, num_samples=1, generator=generators[0])
        assert torch.equal(draw_without_waiting(probs, generators[1]), expected)
        assert torch.equal(*(g.get_state() for g in generators))
