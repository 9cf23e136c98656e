"""Logging to Weights & Biases and TensorBoard."""
import sys
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.errors import UserError
from tests.programs.support import VANILLA, metrics, run_train


class FakeWandB:
    def __init__(self):
        self.rows, self.finished = [], False

    def init(self, **kwargs):
        self.kwargs = kwargs
        return SimpleNamespace(log=self.rows.append, finish=lambda: setattr(self, 'finished', True))


def scalars(out_dir):
    events = EventAccumulator(str(out_dir / 'tensorboard'))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)]
            for name in events.Tags()['scalars']}


def test_wandb_gets_nanogpts_rows(tmp_path, monkeypatch):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, 'wandb', fake)
    run_train(tmp_path / 'out', wandb_log=True, wandb_project='p', wandb_run_name='r', max_iters=12)
    assert fake.kwargs['project'] == 'p' and fake.kwargs['name'] == 'r'
    assert fake.kwargs['config']['n_embd'] == 16
    assert [row['iter'] for row in fake.rows] == [0, 10, 12] and fake.finished
    assert all(row.keys() == {'iter', 'train/loss', 'val/loss', 'lr', 'mfu'} for row in fake.rows)
    evaluated = [row['val_loss'] for row in metrics(tmp_path / 'out') if 'val_loss' in row]
    assert [row['val/loss'] for row in fake.rows] == evaluated


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
