"""Intervals, p-values and corrections, against figures calculated by hand or from tables."""
import math

import numpy as np
import pytest

from lab.ablation import stats
from lab.ablation.stats import evaluation_half, holm, mean_sd, paired_difference, seeds_needed


def test_mean_and_sample_standard_deviation():
    found = mean_sd([1.0, 2.0, 4.0])
    assert found['mean'] == pytest.approx(7 / 3) and found['sd'] == pytest.approx(1.5275252)
    assert mean_sd([1.5])['sd'] is None


def test_a_paired_difference_and_its_interval():
    """Differences -0.1, -0.3, -0.2: mean -0.2, sd 0.1; t(0.975, 2) = 4.303."""
    found = paired_difference({1: 1.0, 2: 2.0, 3: 3.0}, {1: 1.1, 2: 2.3, 3: 3.2, 9: 0.0})
    assert found['mean'] == pytest.approx(-0.2) and found['seeds'] == [1, 2, 3]
    assert found['half_95'] == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-4)
    # twice the upper tail of t with 2 degrees of freedom at 0.2 / (0.1 / sqrt(3)) = 3.4641
    assert found['p'] == pytest.approx(1 - 3.4641016 / math.sqrt(2 + 12))
    assert paired_difference({1: 1.0}, {2: 1.0}) is None
    assert paired_difference({1: 1.0}, {1: 0.5})['half_95'] is None


@pytest.mark.parametrize('n, t', [(2, 12.706), (11, 2.228), (31, 2.042)])
def test_the_interval_widens_with_few_seeds(n, t):
    ours, others = {k: float(k % 2) for k in range(n)}, dict.fromkeys(range(n), 0.0)
    share = sum(ours.values()) / n
    sd = math.sqrt(sum((x - share) ** 2 for x in ours.values()) / (n - 1))
    assert paired_difference(ours, others)['half_95'] == pytest.approx(t * sd / n ** 0.5, rel=3e-4)


def test_equal_differences_have_no_width():
    assert paired_difference({1: 1.0, 2: 1.5}, {1: 1.0, 2: 1.5})['p'] == 1.0
    assert paired_difference({1: 1.0, 2: 1.5}, {1: 0.5, 2: 1.0})['p'] == 0.0


def test_the_bootstrap_of_windows_is_the_normal_interval_of_their_mean():
    rng = np.random.default_rng(1)
    ours, others = rng.normal(size=(3, 400)), rng.normal(size=(3, 400))
    normal = 1.96 * (ours - others).mean(0).std() / 20
    assert evaluation_half(ours, others) == pytest.approx(normal, rel=0.06)
    shifted = others + rng.normal(size=400)  # harder windows, for both: they cancel
    assert evaluation_half(shifted, others + 1.0) > 0
    assert evaluation_half(ours[:, :9], others[:, :9]) is None
    assert evaluation_half(shifted, shifted + 1.0) == pytest.approx(0, abs=1e-12)


def test_seeds_needed_for_an_interval():
    """sd 0.018: with 8 pairs 2.365 * 0.018 / sqrt(8) = 0.01505, with 9 2.306 * 0.018 / 3 =
    0.01384."""
    assert seeds_needed(0.018, 0.0151) == 8 and seeds_needed(0.018, 0.0150) == 9
    assert seeds_needed(0.0, 0.01) == 2


def test_holm_stops_at_the_first_that_falls():
    """Bonferroni alone (0.05 / 4) would keep only 'a'."""
    assert holm({'a': 0.001, 'b': 0.015, 'c': 0.02, 'd': 0.5}) == {'a', 'b', 'c'}
    assert holm({'a': 0.02, 'b': 0.03, 'c': 0.03}) == set()
    assert holm({}) == set()


@pytest.mark.parametrize('degrees, t, outside', [
    (1, 12.706, 0.05), (1, 63.657, 0.01), (2, 4.303, 0.05), (3, 3.182, 0.05), (7, 2.365, 0.05),
    (7, 3.499, 0.01), (10, 2.228, 0.05), (30, 2.042, 0.05), (30, 2.750, 0.01), (2, 0.0, 1.0)])
def test_students_t_as_printed_in_tables(degrees, t, outside):
    # the tables round t to 0.0005, and the density there is at most 0.1
    assert stats.t_outside(t, degrees) == pytest.approx(outside, abs=1e-4)
    assert stats.t_outside(-t, degrees) == stats.t_outside(t, degrees)
    if t:
        assert stats.t_bound(degrees, outside) == pytest.approx(t, rel=2e-4)
