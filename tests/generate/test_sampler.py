"""The sampler: what each setting keeps, how often it draws it, and whose random numbers a row uses."""
import math

import pytest
import torch

from engine.sampler import sample_generators
from generate import Sampler, draw_without_waiting

CPU = torch.device('cpu')
PROBS = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
DRAWS = 20_000


def draws(sampler, logits, n=DRAWS, seed=0):
    torch.manual_seed(seed)
    return sampler(logits.expand(n, -1)).squeeze(1)


def frequencies(sampler, logits, n=DRAWS):
    return torch.bincount(draws(sampler, logits, n), minlength=logits.numel()) / n


def kept(logits, **settings):
    """Ids that the sampler can ever draw."""
    return set(draws(Sampler(**settings), logits).tolist())


def close(frequency, p):
    """Within 4.5 standard deviations of a binomial (fixed seed: this cannot flake)."""
    return ((frequency - p).abs() <= 4.5 * (p * (1 - p) / DRAWS).sqrt()).all()


def test_temperature_0_takes_the_likeliest_of_each_row():
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 3.0, 2.0], [0.0, 0.0, 0.1]])
    assert Sampler(temperature=0)(logits).tolist() == [[1], [0], [2]]


def test_temperature_0_uses_no_random_numbers():
    before = torch.get_rng_state()
    Sampler(temperature=0)(torch.randn(3, 5, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize('temperature', [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_distribution(temperature):
    p = PROBS ** (1 / temperature)
    assert close(frequencies(Sampler(temperature), PROBS.log()), p / p.sum())


def test_top_k_draws_only_the_k_likeliest_in_proportion():
    frequency = frequencies(Sampler(top_k=2), PROBS.log())
    assert close(frequency, torch.tensor([0.4, 0.3, 0, 0, 0]) / 0.7)


def test_top_k_keeps_ties_with_the_kth_as_nanogpt_does():
    assert kept(torch.tensor([3.0, 2.0, 2.0, 2.0, 1.0]), top_k=2) == {0, 1, 2, 3}


@pytest.mark.parametrize('top_k', [0, 5, 6, 1000])
def test_top_k_of_nothing_or_all_changes_no_draw(top_k):
    assert torch.equal(draws(Sampler(top_k=top_k), PROBS.log(), 500), draws(Sampler(), PROBS.log(), 500))


def test_top_k_1_is_greedy():
    assert kept(PROBS.log(), top_k=1, temperature=5.0) == {0}


@pytest.mark.parametrize('top_p, expected', [(0.01, {0}), (0.39, {0}), (0.41, {0, 1}), (0.69, {0, 1}),
                                             (0.71, {0, 1, 2}),
                                             (0.84, {0, 1, 2}), (0.86, {0, 1, 2, 3}), (0.96, set(range(5))),
                                             (1.0, set(range(5)))])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p, expected):
    assert kept(PROBS.log(), top_p=top_p) == expected
    shuffled = torch.tensor([3, 0, 4, 1, 2])  # whatever the order of the ids
    assert {int(shuffled[i]) for i in kept(PROBS[shuffled].log(), top_p=top_p)} == expected


def test_top_p_exactly_reached_needs_no_more():
    logits = torch.tensor([0.5, 0.25, 0.25]).log()
    assert kept(logits.double(), top_p=0.5) == {0}


def test_top_p_draws_in_proportion():
    assert close(frequencies(Sampler(top_p=0.65), PROBS.log()), torch.tensor([0.4, 0.3, 0, 0, 0]) / 0.7)


def test_top_p_counts_after_temperature_and_top_k():
    """Of the two likeliest the first has 4/7 > 0.5; of all it has 0.4 < 0.5. Hot, it has less than 0.3."""
    assert kept(PROBS.log(), top_p=0.5, top_k=2) == {0}
    assert kept(PROBS.log(), top_p=0.5) == {0, 1}
    assert kept(PROBS.log(), top_p=0.5, temperature=100.0) == {0, 1, 2}


def test_each_row_is_restricted_by_itself():
    logits = torch.stack([PROBS.log(), PROBS.flip(0).log()])
    torch.manual_seed(0)
    drawn = torch.cat([Sampler(top_k=1)(logits), Sampler(top_p=0.1)(logits)], dim=1)
    assert drawn.tolist() == [[0, 0], [4, 4]]


def test_logits_are_left_as_they_were():
    logits = PROBS.log()[None].clone()
    Sampler(0.5, 2, 0.5)(logits)
    assert torch.equal(logits, PROBS.log()[None])


def test_minus_infinity_is_never_drawn():
    assert kept(torch.tensor([0.0, -math.inf, 0.0])) == {0, 2}


# -- generators -------------------------------------------------------------------------------------------------------

def generators(first, count, seed=5):
    torch.manual_seed(seed)
    return sample_generators(seed, first + count, CPU)[first:]


def rows_drawn(gens, n=20):
    logits = torch.linspace(0, 1, 9).expand(len(gens), 9)
    sampler = Sampler(generators=gens)
    return torch.cat([sampler(logits) for _ in range(n)], dim=1)


def test_a_rows_draws_do_not_depend_on_what_else_is_in_the_batch():
    together = rows_drawn(generators(0, 4))
    for k in range(4):
        assert torch.equal(rows_drawn(generators(k, 1)), together[[k]])
    assert torch.equal(rows_drawn(generators(1, 2)), together[1:3])
    assert len({tuple(row) for row in together.tolist()}) == 4


def test_rows_with_generators_leave_the_global_one_alone():
    gens = generators(0, 2)
    before = torch.get_rng_state()
    rows_drawn(gens)
    assert torch.equal(torch.get_rng_state(), before)


def test_sample_0_goes_on_where_the_global_generator_stands():
    torch.manual_seed(5)
    torch.randn(100)  # a model is built
    gens = sample_generators(5, 2, CPU)
    assert torch.equal(gens[0].get_state(), torch.get_rng_state())
    expected = torch.cat([Sampler()(torch.linspace(0, 1, 9)[None]) for _ in range(20)], dim=1)
    assert torch.equal(rows_drawn(gens[:1]), expected)


def test_later_samples_depend_on_seed_and_k_alone():
    a = generators(1, 3)
    torch.manual_seed(0)
    torch.randn(50)
    b = sample_generators(5, 4, CPU)[1:]
    assert all(torch.equal(x.get_state(), y.get_state()) for x, y in zip(a, b))
    states = {bytes(g.get_state().numpy()) for seed in (5, 6) for g in generators(1, 3, seed)}
    assert len(states) == 6


@pytest.mark.parametrize('seed', [-1, 0, 2 ** 63, 2 ** 64 - 1, -2 ** 63])
def test_every_seed_that_torch_takes_works(seed):
    assert len(generators(0, 3, seed)) == 3


def test_the_draw_that_does_not_wait_is_multinomials():
    probs = torch.rand(5, 100, generator=torch.Generator().manual_seed(0)).softmax(-1)
    for seed in range(20):
        generators = [torch.Generator().manual_seed(seed) for _ in 'ab']
        expected = torch.multinomial(probs, num_samples=1, generator=generators[0])
        assert torch.equal(draw_without_waiting(probs, generators[1]), expected)
        assert torch.equal(*(g.get_state() for g in generators))
