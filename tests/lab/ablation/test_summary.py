"""Differences of rows, against numbers calculated by hand."""
import pytest

from lab.ablation.summary import correct_for_number, difference


def test_losses_by_window_give_the_error_of_the_evaluation():
    runs = {seed: {'val_loss': 1.0, 'loss_by_window': [0.5, 1.5] * 50} for seed in (1, 2)}
    others = {seed: {'val_loss': 1.5, 'loss_by_window': [1.0, 2.0] * 50} for seed in (1, 2, 3)}
    assert difference(runs, others)['evaluation_half_95'] == pytest.approx(0, abs=1e-12)
    del others[2]['loss_by_window']
    found = difference(runs, others)
    assert found['evaluation_half_95'] is None and found['mean'] == -0.5
    assert difference(runs, {9: others[1]}) is None


def test_what_stands_in_a_column():
    """Of p = 0.01, 0.02 and 0.04, Holm keeps those below 0.05/3, then 0.05/2, then 0.05."""
    column = [{'each': [1] * 3, 'p': p} for p in (0.04, 0.01, 0.02)] + [{'each': [1, 2], 'p': 0.0}]
    correct_for_number(column)
    assert [each.get('stands') for each in column] == [True, True, True, None]
    column[2]['p'] = 0.03
    correct_for_number(column)
    assert [each.get('stands') for each in column] == [False, True, False, None]
