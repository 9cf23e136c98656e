"""Rows with their own parameters: each is sampled from the right distribution, which depends only
on the row."""
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.requests.params import SamplingParams
from engine.requests.request import Request, uniforms
from engine.requests.sampler import _penalised, _weights, draw_plain, sample_rows

params = st.builds(SamplingParams, temperature=st.sampled_from([0, 0.3, 1.0, 1.7]),
                   top_k=st.integers(0, 12), top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
                   min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.9)),
                   repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]), seed=st.integers(-2, 3),
                   logprobs=st.integers(-1, 3))
batches = st.lists(st.tuples(params, st.lists(st.integers(0, 9), max_size=8), st.integers(0, 30)),
                   min_size=1, max_size=6)


def random_logits(*shape, seed=0, dtype=torch.float32):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def row_of(params, seen=(), n_sampled=0):
    """A request that has these tokens, and of which so many were sampled."""
    request = Request(0, list(seen), params)
    request.tokens = [0] * n_sampled
    return request


def make(batch):
    return [row_of(*row) for row in batch]


def probabilities(logits, rows):
    """(B, V) float64: the distributions that `sample_rows` samples from."""
    scores = _penalised(logits if logits.dtype == torch.float64 else logits.float(), rows)
    probs = torch.zeros(scores.shape, dtype=torch.float64)
    for b, row in enumerate(rows):
        p = row.params
        if p.temperature == 0:
            probs[b, scores[b].argmax()] = 1
        else:
            weights, ids = _weights(scores[b:b + 1], [row], p.top_k, p.top_p, p.min_p)
            probs[b, slice(None) if ids is None else ids[0]] = weights[0] / weights.sum()
    return probs


def plainly(logits, row_params, seen):
    """The definition in plain Python: {token: probability} of one row."""
    x = logits.double().tolist()
    for token in set(seen):
        penalty = row_params.repetition_penalty
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    if row_params.temperature == 0:
        return {x.index(max(x)): 1.0}
    weights = [math.exp((v - max(x)) / row_params.temperature) for v in x]
    order = sorted(range(len(x)), key=lambda i: -x[i])
    if row_params.top_k:
        order = [i for i in order if x[i] >= x[order[min(row_params.top_k, len(x)) - 1]]]
    if row_params.top_p < 1:
        kept, total = [], sum(weights[i] for i in order)
        for i in order:
            if sum(weights[j] for j in kept) >= row_params.top_p * total and x[i] < x[kept[-1]]:
                break
            kept.append(i)
        order = kept
    order = [i for i in order if weights[i] >= row_params.min_p]
    total = sum(weights[i] for i in order)
    return {i: weights[i] / total for i in sorted(order)}


def by_inverse_cdf(probs, u):
    """The first token, in order of ids, at which the cumulative probability exceeds u."""
    total = 0.0
    for token, p in probs.items():
        total += p
        if total > u:
            return token


@given(batches, st.integers(0, 1000), st.sampled_from([10, 40]))
def test_a_row_is_drawn_by_its_uniform_number_from_its_own_distribution(batch, seed, n_vocab):
    logits = random_logits(len(batch), n_vocab, seed=seed, dtype=torch.float64)
    drawn, probs = sample_rows(logits, make(batch)), probabilities(logits, make(batch))
    for b, (p, seen, n) in enumerate(batch):
        expected = plainly(logits[b], p, seen)
        assert set(probs[b].nonzero().flatten().tolist()) == set(expected)
        assert all(abs(float(probs[b, i]) - q) < 1e-12 for i, q in expected.items())
        assert drawn.tokens[b] == by_inverse_cdf(expected, uniforms(p.seed, n, 1)[0])


@given(batches, st.integers(0, 1000), st.randoms(use_true_random=False), st.sampled_from([10, 300]))
def test_neither_the_batch_nor_the_order_of_rows_changes_what_a_row_draws(batch, seed, random,
                                                                          n_vocab):
    """Bit for bit, in float32 and with ties (bfloat16), including log-probabilities and a bad
    row."""
    for dtype in (torch.float32, torch.bfloat16):
        logits = random_logits(len(batch), n_vocab, seed=seed).to(dtype)
        logits[random.randrange(len(batch)),
               random.randrange(n_vocab)] = random.choice([math.nan, math.inf, -math.inf, 0.0])
        together = sample_rows(logits, make(batch))
        order = random.sample(range(len(batch)), len(batch))
        shuffled = sample_rows(logits[order], make([batch[b] for b in order]))
        for place, b in enumerate(order):
            alone = sample_rows(logits[b:b + 1], make([batch[b]]))
            assert alone.tokens[0] == together.tokens[b] == shuffled.tokens[place]
            assert alone.logprobs[0] == together.logprobs[b] == shuffled.logprobs[place]


@pytest.mark.parametrize('weights, settings, kept', [
    # tokens that tie with the least likely kept
    *(((9, 4, 4, 4, 2, 0), settings, kept) for settings, kept in (
        (dict(top_k=2), 4), (dict(top_p=0.5), 4), (dict(top_p=0.01), 1), (dict(min_p=0.4), 4),
        (dict(top_k=1), 1), (dict(top_k=5), 5))),
    # top-p stops once the sum equals its bound, and min-p keeps tokens exactly at its bound
    *(((4, 2, 1, 1, 0), settings | dict(top_k=top_k), kept) for settings, kept in (
        (dict(top_p=0.5), 1), (dict(top_p=0.75), 2), (dict(min_p=0.5), 2), (dict(min_p=0.25), 4))
      for top_k in (0, 4))])
def test_the_likeliest_tokens_are_kept(weights, settings, kept):
    logits = torch.tensor([weights]).double().log()
    probs = probabilities(logits, [row_of(SamplingParams(**settings))])
    assert probs[0].nonzero().flatten().tolist() == list(range(kept))


@pytest.mark.parametrize('u, logits, settings, expected', [
    # 1 + exp(-40) == 1, yet the smallest random number selects it, even next to a top-p row
    *((0.0, [-40.0, 0.0, -50.0], [dict(top_p=p, top_k=top_k) for p in (1.0, 0.5)], [0, 1])
      for top_k in (0, 2)),
    # the ends of the unit interval draw a token that is kept
    *((u, [-math.inf, -9.0, 1.0, 1.5, 0.3, -9.0, -math.inf],
       [{}, dict(top_k=3), dict(top_p=0.9), dict(min_p=0.1)], tokens)
      for u, tokens in ((0.0, [1, 2, 2, 2]), (1 - 2.0 ** -53, [5, 4, 4, 4])))])
def test_what_the_smallest_and_the_largest_numbers_draw(monkeypatch, u, logits, settings, expected):
    monkeypatch.setattr('engine.requests.request.uniforms', lambda seed, position, n: [u] * n)
    rows = [row_of(SamplingParams(**each)) for each in settings]
    for scale in torch.linspace(0.9, 1.1, 20) if len(logits) > 3 else (1,):
        drawn = sample_rows((torch.tensor(logits) * scale).expand(len(rows), -1), rows)
        assert drawn.tokens.tolist() == expected


def test_uniforms_are_philox_of_seed_and_position():
    pairs = [(0, 0), (0, 1), (1, 0), (7, 123_456), (-1, 3), (2 ** 64 - 1, 2 ** 40), (-2 ** 63, 0)]
    expected = [(np.random.Philox(key=s % 2 ** 64, counter=n).random_raw() >> 11) / 2 ** 53
                for s, n in pairs]
    assert [uniforms(*pair, 1)[0] for pair in pairs] == expected
    assert uniforms(7, 5, 9) == [uniforms(7, n, 1)[0] for n in range(5, 14)]


def test_the_number_of_a_token_does_not_depend_on_where_a_row_began():
    row = row_of(SamplingParams(seed=3), n_sampled=70)
    for times in [1, 2, 0] * 70:  # also more than once, and not at all
        assert [row.uniform() for _ in range(times)] == uniforms(3, len(row.tokens), 1) * times
        row.tokens.append(1)


@pytest.mark.parametrize('bad, settings', [
    ([math.nan, 1.0, 2.0], dict(temperature=0)), ([3.0, 1.0, math.nan], dict(top_k=2)),
    ([math.inf, 1.0, 2.0], dict(top_p=0.5)), ([-math.inf] * 3, dict(min_p=0.5)),
    ([math.nan] * 3, dict(repetition_penalty=1.5)), ([math.inf] * 3, dict(top_k=2))], ids=str)
def test_a_row_of_bad_logits_is_reported_and_harms_no_other(bad, settings):
    p = SamplingParams(logprobs=1, **settings)
    logits = torch.tensor([[1.0, 2.0, 0.0], bad, [0.0, 1.0, 2.0]])
    drawn = sample_rows(logits, [row_of(p, [0], n) for n in range(3)])
    good = sample_rows(logits[[0, 2]], [row_of(p, [0], n) for n in (0, 2)])
    assert (drawn.tokens < 0).tolist() == [False, True, False] and min(good.tokens) >= 0
    assert drawn.tokens.tolist() == [int(good.tokens[0]), -1, int(good.tokens[1])]
    assert drawn.logprobs == [good.logprobs[0], None, good.logprobs[1]]
    assert None not in good.logprobs


def test_log_probabilities_are_of_the_logits_as_the_model_gave_them():
    logits, before = torch.tensor([[2.0, 1.0] + [-math.inf] * 18]), random_logits(1, 20)
    logits = torch.cat([logits, before])
    asked = SamplingParams(logprobs=5, top_k=1, temperature=0.5, repetition_penalty=3.0)
    drawn = sample_rows(logits, [row_of(asked, range(10))] * 2)
    assert torch.equal(logits[1:], before)
    logprobs = logits.double().log_softmax(-1)
    for entry, token, expected in zip(drawn.logprobs, drawn.tokens, logprobs):
        values, ids = expected.topk(int(expected.isfinite().sum().clamp(max=5)))
        assert entry.token == token and [i for i, _ in entry.top] == ids.tolist()
        assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-12)
        assert [v for _, v in entry.top] == pytest.approx(values.tolist(), abs=1e-12)


@pytest.mark.parametrize('temperatures, restricted, bad', [
    ((0, 0, 0), {}, True), ((0.8, 0.8, 0.8), {}, False), ((0, 1.0, 0.5), {}, True),
    ((0, 1.0, 0.5), dict(top_k=4), False), ((0.8, 0.8, 0.8), dict(top_p=0.7), True),
    ((0, 1.0, 0.5), dict(min_p=0.2), True),
    ((0, 1.0, 0.5), dict(top_k=9, top_p=0.7, min_p=0.1), False)])
def test_sampling_does_not_wait_for_a_device(waits, temperatures, restricted, bad):
    """Neither `sample_rows`, nor the operations for plain rows, which can be captured."""
    logits = random_logits(3, 30)
    logits[1, 3] = math.nan if bad else 0.0
    rows = [row_of(SamplingParams(temperature=t, seed=k, **restricted))
            for k, t in enumerate(temperatures)]
    expected = [by_inverse_cdf(plainly(logits[b], row.params, []), row.uniform()) if t else
                int(logits[b].argmax()) for b, (row, t) in enumerate(zip(rows, temperatures))]
    expected[1] = -1 if bad else expected[1]
    numbers = [torch.tensor([[t] for t in temperatures]).double(),
               torch.tensor([[row.uniform()] for row in rows]).double()]
    waits.clear()
    drawn = [sample_rows(logits, rows).tokens]
    if all(row.plain for row in rows):
        drawn.append(draw_plain(logits, *numbers if any(temperatures) else ()))
    assert waits == []
    assert [tokens.tolist() for tokens in drawn] == [expected] * (1 if restricted else 2)


def test_wrong_calls():
    with pytest.raises(ValueError, match=r'\(2, 3\) for 1 rows'):
        sample_rows(torch.zeros(2, 3), [row_of(SamplingParams())])
    with pytest.raises(IndexError):
        sample_rows(torch.zeros(1, 3), [row_of(SamplingParams(repetition_penalty=2.0), [3])])
    assert sample_rows(torch.zeros(0, 3), []).tokens.tolist() == []


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('B, V', [(1, 1), (6, 50), (8, 1203)])
def test_the_kernels_of_greedy_decoding_are_draw_plain(B, V, dtype, device):
    pytest.importorskip('triton')
    from engine.steps.greedy import most_likely
    logits = random_logits(B, V, seed=V).to(device, dtype)
    if B > 1:
        logits[1] = logits[1].round()  # of equal ones the first
        logits[2], logits[3, -1], logits[4, V // 2] = -torch.inf, torch.nan, torch.inf
        logits[5, : V // 2] = -torch.inf
    found = most_likely(logits)
    assert torch.equal(found, draw_plain(logits)) and found.dtype == torch.int64
    assert B == 1 or found[2:5].tolist() == [-1] * 3
