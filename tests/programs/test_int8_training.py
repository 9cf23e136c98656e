"""train.py with int8_training."""
import pytest

from tests.programs.support import FULL_STACK, losses, run_train


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
