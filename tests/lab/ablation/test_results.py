"""Finished results: those with the same settings, wherever and whenever they were made. Intervals,
p-values and corrections, against figures calculated by hand or from tables."""
import math

import pytest

from common.errors import UserError
from lab.ablation import stats
from lab.ablation.results import Results
from lab.ablation.stats import holm, mean_sd, paired_difference
from lab.ablation.summary import correct_for_number
from tests.lab.ablation.conftest import CONFIG

# flags that change no training
LOGS = ['--log_interval=7', '--eval_iters=1', '--device=cpu']


@pytest.fixture
def results(ladder_of):
    return lambda *flags: Results(ladder_of(CONFIG, *flags))


def test_what_was_written_counts_for_the_same_settings_alone(results):
    here = results()
    row = here.ladder.rows['+ MQA']
    assert here.read(row, 1) is None
    found = {'fingerprint': here.ladder.fingerprint(row), 'settings': here.ladder.weighty(row)}
    here.write(row, 1, found)
    whole = {'row': '+ MQA', 'seed': 1, **found}
    assert here.read(row, 1) == whole and here.read(row, 2) is None
    for flags, same in (LOGS, True), (['--max_iters=7'], False):
        other = results(*flags)
        assert (other.read(other.ladder.rows['+ MQA'], 1) is not None) == same
    int8 = here.ladder.rows['+ int8 KV']
    here.write(int8, 1, found)
    assert here.read(int8, 1) is None  # a different row's
    here.write(row, 1, found | {'val_loss': 2.0})
    assert here.read(row, 1)['val_loss'] == 2.0  # the last line counts


def test_a_new_key_of_train_changes_nothing_and_another_default_does(results):
    here = results()
    row = here.ladder.rows['+ MQA']
    settings = {**here.ladder.weighty(row)}
    found = {'fingerprint': here.ladder.fingerprint(row), 'settings': settings}
    del settings['beta1']      # as if the key had not existed then
    here.write(row, 1, found)
    assert here.read(row, 1)
    settings['beta1'] = 0.8    # as if this had been its default
    here.write(row, 1, found)
    assert here.read(row, 1) is None
    with here.path.open('a') as file:
        file.write('{')
    with pytest.raises(UserError, match='runs.jsonl, line 3 cannot be read.*delete it'):
        here.read(row, 1)


# -- statistics

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


def test_intervals_of_students_t():
    # as printed in tables of Student's t
    for degrees, t, outside in ((1, 12.706, 0.05), (1, 63.657, 0.01), (30, 2.042, 0.05)):
        assert stats.t_bound(degrees, outside) == pytest.approx(t, rel=2e-4)
    assert stats.t_outside(-4.303, 2) == stats.t_outside(4.303, 2) < stats.t_outside(0.0, 2) == 1


def test_what_stands_in_a_column():
    """Holm keeps the smallest of p below 0.05/4, the next below 0.05/3, then 0.05/2, then 0.05, and
    stops at the first that is not (Bonferroni alone keeps only the first). Rows of two seeds do not
    count."""
    column = [{'each': [1] * 3, 'p': p} for p in (0.02, 0.001, 0.5, 0.015)]
    column.append({'each': [1, 2], 'p': 0.0})
    correct_for_number(column)
    assert [each.get('stands') for each in column] == [True, True, False, True, None]
    assert holm({'a': 0.02, 'b': 0.03, 'c': 0.03}) == holm({}) == set()
