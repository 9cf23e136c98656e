"""lab/scripts/loader.py: its shards are a data set, and what it measures is of batches out of it."""
import numpy as np
import pytest

from config.errors import UserError
from data.tokenfiles import open_split
from lab.scripts import loader


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, 'SHARD_BYTES', 60_000)
    monkeypatch.setattr(loader, 'T', 64)
    loader.write_shards(tmp_path, 180_000)
    return tmp_path


def test_the_shards(folder):
    tokens = open_split(folder, 'train')
    assert len(tokens.files) == 3 and len(tokens) == 90_000 and not tokens.short_files()
    assert len(np.unique(tokens.window(0, 90_000))) > 30_000 and loader.forget(folder) in (True, False)


def test_waits_and_rates(folder):
    found = loader.alone(folder, 0.002, 20, 'shuffled')
    assert 0 <= found['share'] < 1 and found['batches'] == 20 and found['longest_ms'] >= 0
    assert loader.most(folder, 20, 4, 'sequential')['batches_per_second'] > 20


def test_all_of_it_is_read_once(folder):
    found = loader.memory(folder)
    assert 0.9 * 180_000 < found['read_bytes'] <= 180_000
    assert found['growth_bytes'] == found['most_bytes'] - found['before_bytes'] >= 0


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match='no such folder'):
        loader.main([f'--folder={tmp_path / "none"}', f'--save={tmp_path / "x.json"}'])
    assert not (tmp_path / 'x.json').exists()
