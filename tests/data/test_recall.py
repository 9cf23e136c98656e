"""The recall task: answers are right, unique in the sequence before the query, and at the distances asked for."""

import time

import numpy as np
import pytest

from config.errors import UserError
from data.recall.task import RecallTask

SETTINGS = {'block_size': 256, 'n_keys': 32, 'n_values': 24, 'n_pairs': 6,
            'n_queries': 4, 'min_distance': 4, 'max_distance': 200}
TASK = RecallTask(**SETTINGS)


@pytest.fixture(scope='module')
def batch():
    return TASK.batch(np.random.default_rng(1), 64)


def test_shapes_ids_and_counts(batch):
    assert TASK.vocab_size == 32 + 24 + TASK.n_filler
    for array in batch:
        assert array.shape == (64, 256) and array.dtype == np.int64
    x, y, distance = batch
    assert x.min() >= 0 and x.max() == TASK.vocab_size - 1
    assert ((y >= 0).sum(axis=1) == 4).all()
    assert ((y == -1) == (distance == 0)).all()


def test_answers_follow_queries_and_are_what_was_shown(batch):
    x, y, distance = batch
    for b in range(len(x)):
        for t in np.flatnonzero(y[b] >= 0):
            value_at = t - distance[b, t]
            assert x[b, value_at] == y[b, t] and x[b, value_at - 1] == x[b, t] < 32
            assert 32 <= y[b, t] < 56
            assert t == 255 or x[b, t + 1] == y[b, t]
            # the key was seen once before: no other place, nearer or farther, gives the answer away
            assert np.flatnonzero(x[b, :t] == x[b, t]).tolist() == [value_at - 1]


def test_pairs_are_early_distinct_and_nothing_else_is_key_or_value(batch):
    x, y, _ = batch
    for b in range(len(x)):
        keys_at = np.flatnonzero(x[b] < 32)
        queries_at = np.flatnonzero(y[b] >= 0)
        pairs_at = np.setdiff1d(keys_at, queries_at)
        assert len(pairs_at) == 6 and len(set(x[b, pairs_at])) == 6
        assert pairs_at.max() + 1 < 256 - 200
        values_at = np.flatnonzero((x[b] >= 32) & (x[b] < 56))
        assert set(values_at) == {t + 1 for t in keys_at if t < 255}


def test_distances_are_uniform():
    rng = np.random.default_rng(2)
    distance = np.concatenate([TASK.batch(rng, 256)[2].ravel() for _ in range(8)])
    distance = distance[distance > 0]
    assert distance.min() == 4 and distance.max() == 200
    counts, _ = np.histogram(distance, bins=8, range=(4, 201))
    assert counts.min() > 0.85 * len(distance) / 8 and counts.max() < 1.15 * len(distance) / 8


def test_values_cannot_be_memorised():
    rng = np.random.default_rng(3)
    x, y, _ = TASK.batch(rng, 1024)
    rows, at = np.nonzero(y >= 0)
    for key in range(0, 32, 8):
        counts = np.bincount(y[rows, at][x[rows, at] == key] - 32, minlength=24)
        assert counts.max() < 4 * counts.mean()


def test_same_seed_same_batch():
    one, two, other = (TASK.batch(np.random.default_rng(seed), 8) for seed in (5, 5, 6))
    assert all((a == b).all() for a, b in zip(one, two, strict=True))
    assert (one[0] != other[0]).any()


def test_one_fixed_distance_and_the_last_position():
    task = RecallTask(block_size=16, n_keys=4, n_values=4, n_pairs=1, n_queries=1, min_distance=14, max_distance=14)
    x, y, distance = task.batch(np.random.default_rng(0), 8)
    assert (distance[:, 15] == 14).all() and (y[:, 15] == x[:, 1]).all()


def test_is_fast_enough():
    rng = np.random.default_rng(0)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        TASK.batch(rng, 32)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.02  # 1 ms on an idle core; a loop over positions would take far longer


@pytest.mark.parametrize('change, words', [
    ({'max_distance': 256}, 'max_distance=256'),
    ({'max_distance': 250}, 'max_distance=250'),
    ({'min_distance': 201}, 'min_distance=201'),
    ({'min_distance': 0}, 'min_distance=0'),
    ({'n_pairs': 33}, 'n_pairs=33'),
    ({'n_pairs': 29}, '29 pairs'),
    ({'n_pairs': 28, 'n_queries': 28}, 'too crowded'),
    ({'n_queries': 7}, 'n_queries=7'),
    ({'n_values': 1}, 'n_values=1'),
    ({'n_keys': 0}, 'n_keys=0'),
])
def test_impossible_settings(change, words):
    with pytest.raises(UserError) as caught:
        RecallTask(**{**SETTINGS, **change})
    assert words in str(caught.value) and '\n' not in str(caught.value)
