"""Logging to Weights & Biases and TensorBoard."""
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.errors import UserError
from tests.programs.support import VANILLA, metrics, run_train


def scalars(out_dir):
    events = EventAccumulator(str(out_dir / 'tensorboard'))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)]
            for name in events.Tags()['scalars']}


def test_wandb_gets_nanogpts_rows(tmp_path, monkeypatch):
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    run_train(tmp_path / 'out', wandb_log=True, wandb_project='p', wandb_run_name='r', max_iters=12)
    given, run = wandb.init.call_args.kwargs, wandb.init.return_value
    assert (given['project'], given['name'], given['config']['n_embd']) == ('p', 'r', 16)
    run.finish.assert_called_once_with()
    rows = [row for call in run.log.call_args_list for row in call.args]
    assert [row['iter'] for row in rows] == [0, 10, 12]
    assert all(row.keys() == {'iter', 'train/loss', 'val/loss', 'lr', 'mfu'} for row in rows)
    evaluated = [row['val_loss'] for row in metrics(tmp_path / 'out') if 'val_loss' in row]
    assert [row['val/loss'] for row in rows] == evaluated


def test_tensorboard_gets_evaluations_and_steps(tmp_path):
    rows = run_train(tmp_path / 'out', tensorboard_log=True, max_iters=12).rows
    found = scalars(tmp_path / 'out')
    steps = {f'step/{name}' for name in rows[1].keys() - {'iter'}}
    assert found.keys() == {'train/loss', 'val/loss', 'lr', 'mfu'} | steps
    assert found['step/loss'] == [(row['iter'], pytest.approx(row['loss'], rel=1e-6))
                                  for row in rows]
    assert [step for step, _ in found['val/loss']] == [0, 10, 12]

    # the checkpoint is at 12, where the log ends; each step is there once
    run_train(tmp_path / 'out', tensorboard_log=True, max_iters=14, init_from='resume')
    run_train(tmp_path / 'out', tensorboard_log=True, init_from='resume', eval_only=True)
    assert [step for step, _ in scalars(tmp_path / 'out')['step/loss']] == list(range(15))


def test_a_link_in_place_of_tensorboards_folder_is_refused(tmp_path):
    (tmp_path / 'elsewhere').mkdir()
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'tensorboard').symlink_to(tmp_path / 'elsewhere')
    with pytest.raises(UserError, match='out/tensorboard is a link: delete it'):
        run_train(tmp_path / 'out', tensorboard_log=True)
    assert not list((tmp_path / 'elsewhere').iterdir())


def no_key(**_):
    raise RuntimeError('no API key\nconfigured')


@pytest.mark.parametrize('package, module, key, message', [
    ('wandb', None, 'wandb_log', 'pip install wandb'),
    ('torch.utils.tensorboard', None, 'tensorboard_log', 'pip install tensorboard'),
    ('wandb', SimpleNamespace(init=no_key), 'wandb_log',
     'no API key configured.*WANDB_MODE=offline')])
def test_what_cannot_start_is_named(tmp_path, monkeypatch, package, module, key, message):
    monkeypatch.setitem(sys.modules, package, module)
    with pytest.raises(UserError, match=message):
        run_train(tmp_path / 'out', VANILLA, **{key: True})
