"""The copy task: what is asked for stands earlier in the sequence, at the stated distance, and nothing else is scored."""
import numpy as np
import pytest

from config.errors import UserError
from data.recall.task import CopyTask

TASK = CopyTask(block_size=96, n_tokens=64, length=20, min_distance=30, max_distance=60)


def test_every_answer_stands_where_its_distance_says():
    x, y, distance = TASK.batch(np.random.default_rng(0), 64)
    rows, at = np.nonzero(y >= 0)
    assert (x[rows, at - distance[rows, at]] == y[rows, at]).all()
    assert (distance[y < 0] == 0).all()
    assert set(np.unique(distance[y >= 0])) <= set(range(29, 60)) and len(np.unique(distance[y >= 0])) > 20


def test_all_of_the_string_is_asked_and_appears_in_x_as_in_language_modelling():
    x, y, _ = TASK.batch(np.random.default_rng(1), 64)
    assert ((y >= 0).sum(axis=1) == TASK.length).all()
    rows, at = np.nonzero(y[:, :-1] >= 0)
    assert (x[rows, at + 1] == y[rows, at]).all()


def test_answers_cannot_be_guessed_from_elsewhere():
    """Each scored token occurs exactly once before it is asked for, and the strings differ from row to row."""
    x, y, distance = TASK.batch(np.random.default_rng(2), 32)
    for row, at in zip(*np.nonzero(y >= 0)):
        assert (x[row, :at + 1] == y[row, at]).sum() == 1
    assert len({tuple(r[r >= 0]) for r in y}) == 32


@pytest.mark.parametrize('change', [{'length': 65}, {'min_distance': 20}, {'min_distance': 61}, {'max_distance': 80},
                                    {'n_filler': 0}])
def test_impossible_settings_are_refused(change):
    with pytest.raises(UserError, match=str(next(iter(change.values())))):
        CopyTask(**{**vars(TASK), **change})
