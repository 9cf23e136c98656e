"""train.py with int8_training and int8_forward."""
import re

import pytest

from config.errors import UserError
from tests.programs.support import FULL_STACK, load, losses, run_train


@pytest.mark.parametrize('policy', ['none', 'block'])
def test_a_run_learns_and_resumes_exactly(tmp_path, policy, capsys):
    config = dict(FULL_STACK, recompute=policy)
    plain = run_train(tmp_path / 'plain', config)
    whole = run_train(tmp_path / 'whole', config, int8_training=True)
    assert 'training 28 matrices of blocks in int8' in capsys.readouterr().out
    assert losses(tmp_path / 'plain') != losses(tmp_path / 'whole')
    expected = [row['loss'] for row in plain.rows]
    assert [row['loss'] for row in whole.rows] == pytest.approx(expected, abs=0.05)
    run_train(tmp_path / 'parts', config, max_iters=10, int8_training=True)
    run_train(tmp_path / 'parts', config, int8_training=True, init_from='resume')
    assert losses(tmp_path / 'parts') == losses(tmp_path / 'whole')


def test_int8_forward_trains_a_plain_checkpoint(tmp_path, capsys):
    """Its losses are near those without; its validation loss is the rounded model's."""
    plain = run_train(tmp_path / 'plain', FULL_STACK)
    run = run_train(tmp_path / 'rounded', FULL_STACK, int8_forward=True)
    assert 'rounding the weights and inputs of the blocks to int8' in capsys.readouterr().out
    expected = [row['loss'] for row in plain.rows]
    found = [row['loss'] for row in run.rows]
    assert found != expected and found == pytest.approx(expected, abs=0.1)
    saved, other = load(run.path), load(plain.path)
    assert {name: x.dtype for name, x in saved['model'].items()} == {
        name: x.dtype for name, x in other['model'].items()}
    evaluated = []
    for rounds in (True, False):
        run_train(run.path.parent, FULL_STACK, init_from='resume', eval_only=True,
                  int8_forward=rounds)
        evaluated.append(re.findall('^step .*', capsys.readouterr().out, re.M))
    assert evaluated[0] != evaluated[1] and len(evaluated[0]) == len(evaluated[1]) == 1


def test_two_ways_to_round_the_same_are_refused(tmp_path):
    with pytest.raises(UserError, match='int8_training=True and int8_forward=True'):
        run_train(tmp_path / 'out', FULL_STACK, int8_training=True, int8_forward=True)
