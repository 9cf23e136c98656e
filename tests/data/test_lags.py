"""The lag task: recalling tokens at marked distances."""
import numpy as np
import pytest

from config.errors import UserError
from data.recall.lags import LagTask
from data.recall.tasks import read_task

TASK = LagTask(block_size=96, distances=(3, 20, 50))


def test_every_answer_stands_where_its_marker_says():
    x, y, distance = TASK.batch(np.random.default_rng(0), 64)
    rows, at = np.nonzero(y >= 0)
    marker = np.searchsorted(TASK.distances, distance[rows, at])
    assert (x[rows, at] == TASK.n_tokens + marker).all()
    assert (x[rows, at - distance[rows, at]] == y[rows, at]).all()
    assert (y[rows, at] < TASK.n_tokens).all()
    assert (distance[y < 0] == 0).all() and (x[y < 0] < TASK.n_tokens).all()


def test_every_distance_is_asked_often_and_as_soon_as_it_fits():
    _, y, distance = TASK.batch(np.random.default_rng(1), 500)
    assert 0.25 < (y >= 0).mean() < 0.34
    for d in TASK.distances:
        assert (distance == d)[:, :d].sum() == 0 < (distance == d)[:, d].sum()
        late = (distance[:, 50:] == d).mean() / (y[:, 50:] >= 0).mean()
        assert late == pytest.approx(1 / 3, abs=0.02)


def test_one_distance_can_be_asked_for():
    x, _, distance = TASK.batch(np.random.default_rng(4), 64, distance=20)
    assert set(np.unique(distance)) == {0, 20} and x.max() == TASK.n_tokens + 1


def test_a_task_is_read():
    assert read_task('recall', 'n_tokens=9 distances=7,30', 96) == LagTask(96, (7, 30), n_tokens=9)


@pytest.mark.parametrize('text, named', [
    ('', 'distances'), ('distances=', "''"), ('distances=7,x', 'x'), ('lag=7', 'lag=7'),
    ('distances=0', '0'), ('distances=7,7', '7, 7'), ('distances=96', '96'),
    ('distances=7 n_tokens=0', 'n_tokens=0'), ('distances=7 n_tokens=3,4', 'one number')])
def test_impossible_settings_are_refused(text, named):
    with pytest.raises(UserError, match=named.replace('.', r'\.')):
        read_task('recall', text, 96)
