"""Fixtures for train.py and sample.py: a tiny data set, hooks for the loop, trained models."""
import pytest
import torch

import train
from tests.programs.support import FULL_STACK, VANILLA, make_tiny, run_train


@pytest.fixture(scope='session')
def data_root(tmp_path_factory):
    """data/ with one data set, 'tiny'. Shared: a test that changes it uses `own_data_root`."""
    root = tmp_path_factory.mktemp('data')
    make_tiny(root)
    return root


@pytest.fixture
def own_data_root(tmp_path, monkeypatch):
    root = tmp_path / 'data'
    root.mkdir()
    make_tiny(root)
    monkeypatch.setattr(train, 'DATA_ROOT', root)
    monkeypatch.setattr('interop.load.DATA_ROOT', root)
    return root


@pytest.fixture(autouse=True)
def _in_process(monkeypatch, data_root):
    monkeypatch.setattr(train, 'DATA_ROOT', data_root)
    monkeypatch.setattr('interop.load.DATA_ROOT', data_root)
    monkeypatch.setattr('engine.native._wanted', True)  # programs change it; restored afterwards


@pytest.fixture
def at_step(monkeypatch):
    """`at_step(n, act)`: call `act()` just before iteration n (from 0) trains."""
    plain, acts = train.Run.step, {}

    def step(run):
        if run.iter_num in acts:
            acts.pop(run.iter_num)()
        return plain(run)
    monkeypatch.setattr(train.Run, 'step', step)
    return acts.__setitem__


@pytest.fixture
def final_weights(monkeypatch):
    """The last run's weights after its loop (a checkpoint has those before the last iteration)."""
    plain, kept = train.train, {}

    def loop(run, *args):
        plain(run, *args)
        kept.clear()
        kept.update({name: x.clone() for name, x in run.model.state_dict().items()})
    monkeypatch.setattr(train, 'train', loop)
    return lambda: dict(kept)


@pytest.fixture
def val_losses(monkeypatch):
    """Fake validation losses by iteration; 9 in all others."""
    values = {}

    def evaluate(run, stop):
        return dict(train=1.0, val=values.get(run.iter_num, 9.0))
    monkeypatch.setattr(train.Run, 'evaluate', evaluate)
    return values


@pytest.fixture
def saved(recorded):
    """The iterations at which a checkpoint was written."""
    return recorded(torch, 'save', lambda checkpoint, file: checkpoint['iter_num'])


@pytest.fixture(scope='session')
def trained(tmp_path_factory, data_root):
    """Folders with trained checkpoints, by name. Read-only: tests copy them."""
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, 'DATA_ROOT', data_root)
        for name, config in (('vanilla', VANILLA), ('full', FULL_STACK)):
            folders[name] = tmp_path_factory.mktemp(name)
            run_train(folders[name], config, max_iters=10)
    return folders
