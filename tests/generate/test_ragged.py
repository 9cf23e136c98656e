"""Prompts of different lengths in one batch, and rows that finish early: each row gets the tokens
that it would get by itself."""
import pytest
import torch

from config.errors import UserError
from generate import Generation, Sampler
from model import GPT
from tests.generate.test_generate import FULL_STACK, KINDS, VANILLA, sharp_model, uncached
from tests.helpers.models import tokens

RAGGED_LOCAL = dict(FULL_STACK, layer_pattern='LG', kv_share='', share_global_kv=False, n_layer=3,
                    window_size=4)


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


@pytest.mark.parametrize('kind', [VANILLA, FULL_STACK, RAGGED_LOCAL],
                         ids=['vanilla', 'full stack', 'unshared'])
@pytest.mark.parametrize('lengths', [(1, 9, 4), (2, 30, 11), (23, 24, 25), (7, 7), (40, 40)],
                         ids=str)
@pytest.mark.parametrize('sampler', [(0, 0), (1.3, 8)], ids=['greedy', 'sampled'])
def test_each_prompt_gets_the_tokens_it_gets_alone(kind, lengths, sampler):
    model, prompts = sharp_model(kind), prompts_of(lengths)
    made = Generation(model, prompts, 30, Sampler(*sampler, generators=seeded(len(prompts))))
    assert torch.equal(torch.cat(list(made), dim=1), alone(model, prompts, 30, sampler))


def test_only_rows_past_block_size_are_recomputed_and_no_finished_ones(monkeypatch):
    """Records (shape, lens) of each forward pass: passes with lens use the cache."""
    fed, plain, model = [], GPT.forward, sharp_model(VANILLA)

    def forward(self, idx, **kw):
        assert ('cache' in kw) == ('lens' in kw)
        fed.append((tuple(idx.shape), kw.get('lens')))
        return plain(self, idx, **kw)
    monkeypatch.setattr(GPT, 'forward', forward)
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
