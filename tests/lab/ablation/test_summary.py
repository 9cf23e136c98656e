"""Means, spreads and paired differences, against figures calculated by hand."""
import math

import pytest

from lab.ablation.summary import gap_curve, mean_curve, mean_sd, paired_difference


def test_mean_and_sample_standard_deviation():
    found = mean_sd([1.0, 2.0, 4.0])
    assert found['mean'] == pytest.approx(7 / 3) and found['sd'] == pytest.approx(1.5275252)
    assert mean_sd([1.5])['sd'] is None


def test_a_paired_difference_and_its_interval():
    """Differences -0.1, -0.3, -0.2: mean -0.2, sd 0.1; t(0.975, 2) = 4.303."""
    found = paired_difference({1: 1.0, 2: 2.0, 3: 3.0}, {1: 1.1, 2: 2.3, 3: 3.2, 9: 0.0})
    assert found['mean'] == pytest.approx(-0.2) and found['seeds'] == [1, 2, 3]
    assert found['half_95'] == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert paired_difference({1: 1.0}, {2: 1.0}) is None
    assert paired_difference({1: 1.0}, {1: 0.5})['half_95'] is None


@pytest.mark.parametrize('n, t', [(2, 12.706), (11, 2.228), (31, 2.042), (32, 1.960)])
def test_the_interval_widens_with_few_seeds(n, t):
    ours, others = {k: float(k % 2) for k in range(n)}, dict.fromkeys(range(n), 0.0)
    share = sum(ours.values()) / n
    sd = math.sqrt(sum((x - share) ** 2 for x in ours.values()) / (n - 1))
    assert paired_difference(ours, others)['half_95'] == pytest.approx(t * sd / math.sqrt(n))


def test_curves_meet_at_the_iterations_that_all_have():
    found = mean_curve([[[0, 4.0], [10, 2.0], [20, 1.0]], [[0, 6.0], [10, 3.0]]])
    assert found == {'iterations': [0, 10], 'mean': [5.0, 2.5], 'low': [4.0, 2.0],
                     'high': [6.0, 3.0]}


def test_the_gap_while_training_pairs_seeds_and_iterations():
    def run(*values):
        return {'training': {'evaluations': [[i, 9.0, v] for i, v in values]},
                'settings': {'eval_iters': 5, 'batch_size': 8}}
    ours = {1: run((0, 4.0), (10, 2.0), (20, 1.0)), 2: run((0, 4.0), (10, 2.5)), 7: run((0, 0.0))}
    others = {1: run((0, 4.0), (10, 1.0)), 2: run((0, 3.0), (10, 2.0), (20, 1.0))}
    assert gap_curve(ours, others) == [[0, 0.5, 0.0, 1.0], [10, 0.75, 0.5, 1.0]]
    assert gap_curve(ours, {}) == []
