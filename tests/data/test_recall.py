"""The synthetic tasks: recalling tokens at marked distances, and looking up facts."""
import numpy as np
import pytest
import torch

from common.errors import UserError
from data.recall.tasks import BLANK, LagTask, LookupTask, read_task
from training.loop.batches import TaskBatches

TASK = LookupTask(block_size=60, pairs=(2, 5, 9), gap=11, n_keys=12, n_values=7)
LAGS = LagTask(block_size=96, distances=(3, 20, 50))
CPU = torch.device('cpu')


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_every_answer_stands_where_its_marker_says():
    x, y, distance = LAGS.batch(np.random.default_rng(0), 64)
    rows, at = np.nonzero(y >= 0)
    marker = np.searchsorted(LAGS.distances, distance[rows, at])
    assert (x[rows, at] == LAGS.n_tokens + marker).all()
    assert (x[rows, at - distance[rows, at]] == y[rows, at]).all()
    assert (y[rows, at] < LAGS.n_tokens).all()
    assert (distance[y < 0] == 0).all() and (x[y < 0] < LAGS.n_tokens).all()


def test_one_distance_or_number_of_facts_can_be_asked_for():
    x, _, distance = LAGS.batch(np.random.default_rng(4), 64, distance=20)
    assert set(np.unique(distance)) == {0, 20} and x.max() == LAGS.n_tokens + 1
    _, _, distance = TASK.batch(np.random.default_rng(3), 20, n_pairs=5)
    assert ((distance > 0).sum(1) == 5).all()


# -- looking up facts ------------------------------------------------------------------------------

def test_every_answer_is_the_value_after_the_same_key_that_far_back():
    x, y, distance = TASK.batch(np.random.default_rng(0), 200)
    rows, at = np.nonzero(distance)
    facts = at - distance[rows, at]
    assert (x[rows, at] == x[rows, facts]).all() and (x[rows, facts] <= TASK.n_keys).all()
    assert (y[rows, at] == x[rows, facts + 1]).all() and (y[rows, at] > TASK.n_keys).all()
    assert y.max() < TASK.vocab_size and y.max() == TASK.n_keys + TASK.n_values
    assert distance[rows, at].min() >= TASK.gap + 2


def test_each_fact_is_stated_and_asked_once_in_another_order():
    x, _, distance = TASK.batch(np.random.default_rng(1), 600)
    numbers = (distance > 0).sum(1)
    asked = [n * (numbers == n).sum() for n in (2, 5, 9)]
    assert sum(asked) == (distance > 0).sum() and max(asked) < 1.5 * min(asked)
    same_order = 0
    for row, back, n in zip(x, distance, numbers):
        stated, asked = row[:2 * n:2], row[back > 0]
        assert sorted(stated) == sorted(asked) and len(set(stated)) == n
        assert (row[2 * n:2 * n + TASK.gap] == BLANK).all()
        same_order += n == 9 and (stated == asked).all()
    assert same_order < 3


def test_all_tokens_but_blanks_are_targets():
    x, y, _ = TASK.batch(np.random.default_rng(2), 50)
    assert (y[:, :-1] == np.where(x[:, 1:] == BLANK, -1, x[:, 1:])).all()


def test_training_repeats_a_fixed_set_and_evaluation_does_not():
    task = read_task('lookup', 'pairs=2,4 gap=3 sequences=8', 20)
    batches = TaskBatches(task, 6, CPU, generator(), seed=5)
    fixed = {tuple(row) for row in task.batch(np.random.default_rng(5), 8)[0].tolist()}
    drawn = [batches.next() for _ in range(20)]
    assert {tuple(row) for x, _ in drawn for row in x.tolist()} == fixed and len(fixed) == 8
    for x, y in batches.evaluation('val', 2, seed=1):
        assert not {tuple(row) for row in x.tolist()} & fixed
        assert set((y >= 0).sum(1).tolist()) <= {2, 4}  # answers only
    again = [x for x, _ in batches.evaluation('val', 2, seed=1)]
    assert all(torch.equal(a, x) for a, (x, _) in zip(again, batches.evaluation('val', 2, 1)))


def test_it_resumes_where_it_was_and_processes_share_the_batches():
    task = read_task('lookup', 'pairs=2 gap=0 sequences=50', 8)
    one = TaskBatches(task, 4, CPU, generator())
    first = [one.next() for _ in range(6)]
    state = one.state
    resumed = TaskBatches(task, 4, CPU, generator(9))
    resumed.order.state = state
    assert torch.equal(resumed.next()[0], first[-1][0])
    two = [TaskBatches(task, 4, CPU, generator(), rank, 2) for rank in (0, 1)]
    for k in range(3):
        for rank in (0, 1):
            assert torch.equal(two[rank].next()[0], first[2 * k + rank][0])


@pytest.mark.parametrize('name, text, named', [
    ('recall', '', 'distances'), ('recall', 'distances=', "''"), ('recall', 'distances=7,x', 'x'),
    ('recall', 'lag=7', 'lag=7'), ('recall', 'distances=0', '0'),
    ('recall', 'distances=7,7', '7, 7'), ('recall', 'distances=30', '30'),
    ('recall', 'distances=7 n_tokens=3,4', 'one number'), ('lookup', '', 'pairs'),
    ('lookup', 'pairs=0', '0'), ('lookup', 'pairs=2,2', '2, 2'),
    ('lookup', 'pairs=9', 'block_size=30'), ('lookup', 'pairs=2 gap=-1', 'gap=-1'),
    ('lookup', 'pairs=2 n_keys=1', 'n_keys=1'), ('lookup', 'pairs=2 n_values=1', 'n_values=1')])
def test_impossible_settings_are_refused(name, text, named):
    with pytest.raises(UserError, match=named):
        read_task(name, text, 30)
