"""Prompts of different lengths in one batch, and rows that finish before others: the tokens each would get alone."""
import pytest
import torch

from config.errors import UserError
from generate import Generation, Sampler, cache_length, generate
from kv.cache import KVCache
from model import GPT
from tests.generate.test_generate import FULL_STACK, KINDS, VANILLA, prompt, seeded, sharp_model, uncached

RAGGED_LOCAL = dict(FULL_STACK, layer_pattern='LG', kv_share='', share_global_kv=False, n_layer=3, window_size=4)
LENGTHS = pytest.mark.parametrize('lengths', [(1, 9, 4), (3, 3, 3), (2, 30, 11), (40, 33), (23, 24, 25)], ids=str)


def prompts_of(lengths):
    return [prompt(1, n, seed=k)[0] for k, n in enumerate(lengths)]


def alone(model, prompts, n, sampler):
    """(B, n) by full forwards, each prompt by itself; `sampler` is (temperature, top_k)."""
    return torch.cat([uncached(model, p[None], n, *sampler, seeded(len(prompts))[k:k + 1])[:, p.numel():]
                      for k, p in enumerate(prompts)])


def feeds(monkeypatch):
    """(shape, lens, whether a cache was given) of each forward pass from now on."""
    fed, plain = [], GPT.forward

    def forward(self, idx, **kw):
        fed.append((tuple(idx.shape), kw.get('lens'), 'cache' in kw))
        return plain(self, idx, **kw)
    monkeypatch.setattr(GPT, 'forward', forward)
    return fed


@pytest.mark.parametrize('kind', [VANILLA, FULL_STACK, RAGGED_LOCAL], ids=['vanilla', 'full stack', 'unshared'])
@LENGTHS
@pytest.mark.parametrize('sampler', [(0, 0), (1.3, 8)], ids=['greedy', 'sampled'])
def test_each_prompt_gets_the_tokens_it_gets_alone(kind, lengths, sampler):
    model, prompts = sharp_model(kind), prompts_of(lengths)
    tokens = torch.cat(list(Generation(model, prompts, 20, Sampler(*sampler, generators=seeded(len(prompts))))), dim=1)
    assert torch.equal(tokens, alone(model, prompts, 20, sampler))


def test_lists_and_tensors_are_prompts_alike():
    model, idx = sharp_model(FULL_STACK), prompt(2, 5)
    a, b, c = (torch.cat(list(Generation(model, p, 9, Sampler(0))), dim=1) for p in (idx, list(idx), idx.tolist()))
    assert torch.equal(a, b) and torch.equal(a, c)


def test_a_given_cache_is_used_and_may_be_used_again_after_a_reset():
    model, prompts = sharp_model(FULL_STACK), prompts_of((2, 9, 5))
    cache = model.new_cache(3, cache_length(model, 9, 12))
    for _ in range(2):
        cache.reset()
        tokens = torch.cat(list(Generation(model, prompts, 12, Sampler(0), cache)), dim=1)
        assert torch.equal(tokens, alone(model, prompts, 12, (0, 0)))
        assert cache.lengths.tolist() == [2 + 11, 9 + 11, 5 + 11]


def test_rows_of_one_length_never_take_the_ragged_way(monkeypatch):
    """Equal lengths need no position tags: also when a row is finished, and when the last ones are recomputed."""
    model, steps, plain = sharp_model(FULL_STACK), [], KVCache.begin

    def begin(self, *args):
        steps.append(plain(self, *args))
        return steps[-1]
    monkeypatch.setattr(KVCache, 'begin', begin)
    generation = Generation(model, prompt(3, 4), 20, Sampler(0))
    for k, _ in enumerate(generation):
        if k == 5:
            generation.finish(1)
    assert len(steps) == 20 and all(step.uniform for step in steps)


def test_only_rows_past_block_size_are_recomputed_and_all_of_them_at_once(monkeypatch):
    fed = feeds(monkeypatch)
    list(Generation(sharp_model(VANILLA), prompts_of((30, 22, 3, 23)), 5, Sampler(0)))
    assert fed == [
        ((4, 23), [0, 22, 3, 23], True), ((1, 24), None, False),
        ((4, 1), [0, 1, 1, 1], True), ((1, 24), None, False),
        ((4, 1), [0, 1, 1, 0], True), ((2, 24), None, False),
        ((4, 1), [0, 0, 1, 0], True), ((3, 24), None, False),
        ((4, 1), [0, 0, 1, 0], True), ((3, 24), None, False)]


# -- finished rows ----------------------------------------------------------------------------------------------------

def cut_at(row, stop_tokens):
    """The row up to its first stop token, which is kept."""
    ends = [i for i, token in enumerate(row) if token in stop_tokens]
    return row[:ends[0] + 1] if ends else row


@KINDS
@pytest.mark.parametrize('lengths', [(4, 4, 4, 4), (1, 20, 25, 9)], ids=str)
@pytest.mark.parametrize('stop_tokens', [(5,), (5, 7, 11), range(23)], ids=['one', 'several', 'any'])
def test_a_row_ends_on_its_first_stop_token_and_the_others_go_on_as_before(kind, lengths, stop_tokens):
    model, prompts = sharp_model(kind), prompts_of(lengths)
    whole = alone(model, prompts, 25, (1.0, 0)).tolist()
    generation = Generation(model, prompts, 25, Sampler(generators=seeded(4)), stop_tokens=stop_tokens)
    tokens = torch.cat(list(generation), dim=1).tolist()
    expected = [cut_at(row, stop_tokens) for row in whole]
    longest = max(map(len, expected))
    assert tokens == [row + row[-1:] * (longest - len(row)) for row in expected]
    assert generation.finished == [row[-1] in stop_tokens for row in expected]


@KINDS
@pytest.mark.parametrize('stop_tokens', [False, True])
def test_rows_may_be_finished_from_outside(kind, stop_tokens):
    """At once, later, and all: the stream ends with the last; the others are not disturbed."""
    model, prompts = sharp_model(kind), prompts_of((4, 23, 2))
    whole = alone(model, prompts, 20, (0, 0))
    unseen = set(range(23)) - set(torch.cat([whole.flatten(), *prompts]).tolist())
    generation = Generation(model, prompts, 20, Sampler(0), stop_tokens=unseen if stop_tokens else ())
    assert unseen
    generation.finish(2)
    tokens = []
    for k, new in enumerate(generation):
        tokens.append(new)
        if k == 3:
            generation.finish(1)
        if k == 8:
            generation.finish(0)
    tokens = torch.cat(tokens, dim=1)
    assert tokens.shape == (3, 9) and torch.equal(tokens[0], whole[0, :9]) and torch.equal(tokens[1, :4], whole[1, :4])
    assert tokens[1, 4:].tolist() == [whole[1, 3]] * 5 and tokens[2].tolist() == [prompts[2][-1]] * 9
    assert generation.finished == [True] * 3


def test_finished_rows_are_not_recomputed(monkeypatch):
    fed = feeds(monkeypatch)
    generation = Generation(sharp_model(VANILLA), prompts_of((30, 40, 24)), 4, Sampler(0))
    for k, _ in enumerate(generation):
        generation.finish(k)
    assert [shape for shape, *_ in fed] == [(3, 24), (2, 24), (2, 24), (1, 24)]


@KINDS
def test_generate_with_stop_tokens_fills_up_with_the_one_a_row_ended_on(kind):
    model, idx = sharp_model(kind), prompt(3, 5)
    torch.manual_seed(3)
    whole = generate(model, idx, 40)[:, 5:].tolist()
    torch.manual_seed(3)
    tokens = generate(model, idx, 40, stop_tokens=(2, 9))
    expected = [cut_at(row, (2, 9)) for row in whole]
    longest = max(map(len, expected))
    assert longest < 40 and len(set(map(len, expected))) == 3  # there is something to see
    assert tokens[:, :5].equal(idx)
    assert tokens[:, 5:].tolist() == [row + row[-1:] * (longest - len(row)) for row in expected]


# -- wrong input ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('prompts, named', [
    ([], 'at least one'), ([[1], []], '(1) has no tokens'), ([[]], 'the prompt has no tokens'), ([1, 2], 'shape ()'),
    (torch.zeros(0, 4, dtype=torch.int64), 'at least one')])
def test_prompts_that_are_none_are_refused(prompts, named):
    with pytest.raises(UserError) as caught:
        Generation(sharp_model(VANILLA), prompts, 3, Sampler(0))
    assert named in str(caught.value) and '\n' not in str(caught.value)


@pytest.mark.parametrize('token', [-1, 23])
def test_stop_tokens_outside_the_vocabulary_are_refused(token):
    with pytest.raises(UserError, match=f'{token}.*0 to 22'):
        Generation(sharp_model(VANILLA), [[1]], 3, Sampler(0), stop_tokens=(1, token))
