"""Fixtures for train.py and sample.py: a tiny data set in place of data/, hooks into the loop, trained models."""
import functools

import pytest

import train
from tests.programs.support import FULL_STACK, VANILLA, make_tiny, run_train


@pytest.fixture(scope='session')
def data_root(tmp_path_factory):
    """data/ with one prepared data set, 'tiny'. Shared: tests that damage it take `own_data_root`."""
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


@pytest.fixture
def at_step(monkeypatch):
    """`at_step(n, act)`: call `act()` just before the n-th iteration (from 0, by number of the run) trains."""
    plain, acts = train.Run.step, {}

    @functools.wraps(plain)
    def step(run):
        if run.iter_num in acts:
            acts.pop(run.iter_num)()
        return plain(run)
    monkeypatch.setattr(train.Run, 'step', step)
    return acts.__setitem__


@pytest.fixture
def final_weights(monkeypatch):
    """The weights of the last run when its loop ended (checkpoints hold those before the last iteration)."""
    plain, kept = train.train, {}

    def loop(run, *args):
        plain(run, *args)
        kept.clear()
        kept.update({name: x.clone() for name, x in run.model.state_dict().items()})
    monkeypatch.setattr(train, 'train', loop)
    return lambda: dict(kept)


@pytest.fixture
def val_losses(monkeypatch):
    """Pretended validation losses, by iteration (9 elsewhere)."""
    values = {}
    monkeypatch.setattr(train.Run, 'evaluate', lambda run, stop: dict(train=1.0, val=values.get(run.iter_num, 9.0)))
    return values


@pytest.fixture(scope='session')
def trained(tmp_path_factory, data_root):
    """Folders with a checkpoint of each kind, by name, trained once. Not to be written to."""
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, 'DATA_ROOT', data_root)
        for name, config in (('vanilla', VANILLA), ('full', FULL_STACK)):
            folders[name] = tmp_path_factory.mktemp(name)
            run_train(folders[name], config, max_iters=10)
    return folders
