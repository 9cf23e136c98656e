"""scripts/compare.py: the loss over a whole split is the mean over its windows, and only like runs share a table."""
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

import configurator
from config.errors import UserError
from model import GPT, GPTConfig


@pytest.fixture
def compare(tmp_path, monkeypatch):
    path = Path(configurator.ROOT) / 'scripts' / 'compare.py'
    spec = importlib.util.spec_from_file_location('compare_under_test', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, 'RESULTS', tmp_path / 'compare')
    return module


def made_up(name, seed, loss, **other):
    return dict(config=name, seed=seed, val_loss=loss, val_tokens=100, dataset='tiny', params=10, B=2, T=8, W=4, steps=3,
                tokens=48, learning_rate=0.1, dtype='float32', hardware='one', torch='2', kv_bytes_bf16=64,
                kv_ratio=48.0) | other


@pytest.mark.parametrize('batch_size', [1, 2, 16])
def test_the_whole_split_counts_each_window_once(compare, batch_size):
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=8)).double().eval()
    tokens = np.random.default_rng(0).integers(11, size=45).astype(np.uint16)
    with torch.no_grad():
        windows = [torch.from_numpy(tokens[i:i + 9].astype(np.int64))[None] for i in range(0, 37, 8)]
        wanted = [model(w[:, :-1], w[:, 1:])[1].item() for w in windows]
    assert len(wanted) == 5
    assert compare.whole_split_loss(model, tokens, 8, batch_size) == pytest.approx(sum(wanted) / 5, abs=1e-12)


def test_the_table_has_mean_and_sd_and_refuses_unlike_runs(compare):
    runs = [made_up('train_mqa_local', 2, 1.6), made_up('train_mqa_local', 1, 1.5), made_up('train_vanilla', 1, 2.0)]
    lines = compare.table(runs).splitlines()[-2:]
    assert lines[0].startswith('| train_vanilla |') and lines[0].endswith('| 2.0000 | 2.0000 | - |')
    assert lines[1].endswith('| 1.5000, 1.6000 | 1.5500 | 0.0707 |')
    with pytest.raises(UserError, match='steps=4'):
        compare.table([*runs, made_up('train_rope_mha', 1, 1.7, steps=4)])


def test_every_run_begins_with_the_name_of_a_config(compare):
    for name, overrides in compare.RUNS.items():
        config = Path(configurator.ROOT) / 'config' / f"{name.split('-')[0]}.py"
        configurator.parse('train', [str(config), *overrides], echo=False)
