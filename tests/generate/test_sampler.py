"""The sampler: which tokens each setting keeps, how often they are sampled, and which random
numbers a row uses."""
import pytest
import torch

from engine.requests.sampler import TopPSampler as Sampler
from engine.requests.sampler import sample_generators
from generate import draw_without_waiting

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
    frequency = torch.bincount(draws(Sampler(**settings), PROBS.log()), minlength=5) / DRAWS
    p = torch.as_tensor(probs) / torch.as_tensor(probs).sum()
    assert ((frequency - p).abs() <= 4.5 * (p * (1 - p) / DRAWS).sqrt()).all()


# -- generators ------------------------------------------------------------------------------------

def generators(first, count, seed=5):
    torch.manual_seed(seed)
    return sample_generators(seed, first + count, CPU)[first:]


def rows_drawn(gens, n=20):
    logits = torch.linspace(0, 1, 9).expand(len(gens), 9)
    sampler = Sampler(generators=gens)
    return torch.cat([sampler(logits) for _ in range(n)], dim=1)


def test_sample_0_goes_on_where_the_global_generator_stands():
    torch.manual_seed(5)
    torch.randn(100)  # as building a model does
    gens = sample_generators(5, 2, CPU)
    assert torch.equal(gens[0].get_state(), torch.get_rng_state())
    expected = torch.cat([Sampler()(torch.linspace(0, 1, 9)[None]) for _ in range(20)], dim=1)
    assert torch.equal(rows_drawn(gens[:1]), expected)


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
