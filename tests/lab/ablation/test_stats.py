"""Intervals, p-values and corrections, against figures calculated by hand or from tables."""
import math

import numpy as np
import pytest

from lab.ablation import stats
from lab.ablation.stats import evaluation_half, holm, mean_sd, paired_difference, seeds_needed
from lab.ablation.summary import correct_for_number, difference


def test_a_paired_difference_and_its_interval():
    """Differences -0.1, -0.3, -0.2: mean -0.2, sd 0.1; t(0.975, 2) = 4.303."""
    found = paired_difference({1: 1.0, 2: 2.0, 3: 3.0}, {1: 1.1, 2: 2.3, 3: 3.2, 9: 0.0})
    assert found['mean'] == pytest.approx(-0.2) and found['seeds'] == [1, 2, 3]
    assert found['half_95'] == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-4)
    # twice the upper tail of t with 2 degrees of freedom at 0.2 / (0.1 / sqrt(3)) = 3.4641
    assert found['p'] == pytest.approx(1 - 3.4641016 / math.sqrt(2 + 12))
    assert paired_difference({1: 1.0}, {2: 1.0}) is None
    assert paired_difference({1: 1.0}, {1: 0.5})['half_95'] is None
    # equal differences have no width
    assert paired_difference({1: 1.0, 2: 1.5}, {1: 1.0, 2: 1.5})['p'] == 1.0
    assert paired_difference({1: 1.0, 2: 1.5}, {1: 0.5, 2: 1.0})['p'] == 0.0
    assert mean_sd([1.0, 2.0, 4.0])['sd'] == pytest.approx(1.5275252)
    assert mean_sd([1.5])['sd'] is None


def test_the_bootstrap_of_windows_is_the_normal_interval_of_their_mean():
    rng = np.random.default_rng(1)
    ours, others = rng.normal(size=(3, 400)), rng.normal(size=(3, 400))
    normal = 1.96 * (ours - others).mean(0).std() / 20
    assert evaluation_half(ours, others) == pytest.approx(normal, rel=0.06)
    shifted = others + rng.normal(size=400)  # harder windows, for both: they cancel
    assert evaluation_half(shifted, others + 1.0) > 0
    assert evaluation_half(ours[:, :9], others[:, :9]) is None
    assert evaluation_half(shifted, shifted + 1.0) == pytest.approx(0, abs=1e-12)


def test_seeds_needed_for_an_interval_of_students_t():
    """sd 0.018: with 8 pairs 2.365 * 0.018 / sqrt(8) = 0.01505, with 9 2.306 * 0.018 / 3 =
    0.01384."""
    assert seeds_needed(0.018, 0.0151) == 8 and seeds_needed(0.018, 0.0150) == 9
    assert seeds_needed(0.0, 0.01) == 2
    # as printed in tables of Student's t
    for degrees, t, outside in ((1, 12.706, 0.05), (1, 63.657, 0.01), (30, 2.042, 0.05)):
        assert stats.t_bound(degrees, outside) == pytest.approx(t, rel=2e-4)
    assert stats.t_outside(-4.303, 2) == stats.t_outside(4.303, 2) < stats.t_outside(0.0, 2) == 1


def test_losses_by_window_give_the_error_of_the_evaluation():
    runs = {seed: {'val_loss': 1.0, 'loss_by_window': [0.5, 1.5] * 50} for seed in (1, 2)}
    others = {seed: {'val_loss': 1.5, 'loss_by_window': [1.0, 2.0] * 50} for seed in (1, 2, 3)}
    assert difference(runs, others)['evaluation_half_95'] == pytest.approx(0, abs=1e-12)
    del others[2]['loss_by_window']
    found = difference(runs, others)
    assert found['evaluation_half_95'] is None and found['mean'] == -0.5
    assert difference(runs, {9: others[1]}) is None


def test_what_stands_in_a_column():
    """Holm keeps the smallest of p below 0.05/4, the next below 0.05/3, then 0.05/2, then 0.05, and
    stops at the first that is not (Bonferroni alone keeps only the first). Rows of two seeds do not
    count."""
    column = [{'each': [1] * 3, 'p': p} for p in (0.02, 0.001, 0.5, 0.015)]
    column.append({'each': [1, 2], 'p': 0.0})
    correct_for_number(column)
    assert [each.get('stands') for each in column] == [True, True, False, True, None]
    assert holm({'a': 0.02, 'b': 0.03, 'c': 0.03}) == holm({}) == set()
