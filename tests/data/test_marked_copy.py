"""Copying from marked distances: answers stand where the distance says, can be guessed from nowhere else, markers tell."""
import numpy as np
import pytest

from config.errors import UserError
from data.recall.lags import MarkedCopyTask, read_task

TASK = MarkedCopyTask(block_size=96, distances=(3, 20, 50), length=12)


def test_every_answer_stands_where_its_distance_says():
    x, y, distance = TASK.batch(np.random.default_rng(0), 64)
    rows, at = np.nonzero(y >= 0)
    assert (x[rows, at - distance[rows, at]] == y[rows, at]).all()
    assert (distance[y < 0] == 0).all() and set(np.unique(distance[y >= 0])) == {3, 20, 50}
    assert all(len(set(d[d > 0])) == 1 for d in distance)  # one in a row


def test_all_of_the_string_is_asked_and_appears_in_x_as_in_language_modelling():
    x, y, distance = TASK.batch(np.random.default_rng(1), 64)
    assert ((y >= 0).sum(axis=1) == np.minimum(12, distance.max(axis=1))).all()
    rows, at = np.nonzero(y[:, :-1] >= 0)
    assert (x[rows, at + 1] == y[rows, at]).all()


def test_answers_cannot_be_guessed_from_elsewhere():
    """Each scored token occurs exactly once before it is asked for, and the strings differ from row to row."""
    x, y, _ = TASK.batch(np.random.default_rng(2), 32)
    for row, at in zip(*np.nonzero(y >= 0)):
        assert (x[row, :at + 1] == y[row, at]).sum() == 1
    assert len({tuple(r[r >= 0]) for r in y}) == 32


def test_the_marker_before_the_string_says_the_distance():
    x, y, distance = TASK.batch(np.random.default_rng(3), 64)
    for row in range(64):
        asked = np.nonzero(y[row] >= 0)[0][0]
        wanted = TASK.n_tokens + TASK.distances.index(distance[row].max())
        assert x[row, asked] == wanted and x[row, asked - distance[row].max() - 1] == wanted
        assert (x[row] == wanted).sum() == 2


def test_one_distance_can_be_asked_for_and_starts_vary():
    x, y, distance = TASK.batch(np.random.default_rng(4), 64, distance=20)
    assert set(np.unique(distance)) == {0, 20}
    assert len({np.nonzero(row >= 0)[0][0] for row in y}) > 20
    assert x.max() < TASK.vocab_size and x.min() >= 0


def test_the_same_numbers_give_the_same_batch():
    for a, b in zip(TASK.batch(np.random.default_rng(5), 8), TASK.batch(np.random.default_rng(5), 8)):
        assert (a == b).all()


@pytest.mark.parametrize('text, wanted', [
    ('distances=7,30', MarkedCopyTask(96, (7, 30))),
    ('length=5 distances=7 n_tokens=9 n_filler=2', MarkedCopyTask(96, (7,), n_tokens=9, length=5, n_filler=2))])
def test_a_task_is_read(text, wanted):
    assert read_task(text, 96) == wanted


@pytest.mark.parametrize('text, named', [('', 'distances'), ('distances=', "''"), ('distances=7,x', 'x'), ('lag=7', 'lag=7'),
                                         ('distances=0', '0'), ('distances=7,7', '7, 7'), ('distances=90', '90'),
                                         ('distances=7 length=65', '65'), ('distances=7 n_filler=0', 'n_filler=0')])
def test_impossible_settings_are_refused(text, named):
    with pytest.raises(UserError, match=named.replace('.', r'\.')):
        read_task(text, 96)
