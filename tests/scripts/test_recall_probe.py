"""scripts/recall_probe.py: runs have what the table needs, finished ones are kept, unknown arms are refused."""
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import configurator


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """The script as a module, made tiny and writing to a folder of its own."""
    path = Path(configurator.ROOT) / 'scripts' / 'recall_probe.py'
    spec = importlib.util.spec_from_file_location('recall_probe_under_test', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in dict(RESULTS=tmp_path / 'recall', STEPS=2, EVAL_EVERY=1, EVAL_ROWS=8, BATCH=2).items():
        monkeypatch.setattr(module, name, value)
    return module


def test_a_run_has_settings_curve_and_accuracy(probe):
    row = json.loads(json.dumps(probe.run('LLLLLG-tied', 3)))
    assert (row['arm'], row['seed'], row['steps'], row['max_steps']) == ('LLLLLG-tied', 3, 2, 2)
    assert [point['step'] for point in row['curve']] == [1, 2]
    assert 0 <= row['accuracy'] == row['curve'][-1]['accuracy'] < 0.5
    assert row['settings'] == probe.RUNS['LLLLLG-tied'] and row['steps_to_95'] is None


def test_runs_with_one_seed_are_the_same(probe):
    a, b, c = (probe.run('local-only', seed)['curve'] for seed in (1, 1, 2))
    assert a == b != c


def test_a_run_ends_early_after_two_perfect_evaluations(probe, monkeypatch):
    monkeypatch.setattr(probe, 'STEPS', 9)
    shares = iter([0.5, 0.96, 1.0, 0.98, 0.99, 1.0, 0.0])
    monkeypatch.setattr(probe, 'accuracy', lambda *args: next(shares))
    row = probe.run('local-only', 1)
    assert (row['steps'], row['steps_to_95'], row['accuracy']) == (6, 2, 1.0)


def test_accuracy_counts_what_is_scored_alone(probe):
    """A model that always names the right token scores 1, whatever it says where nothing is scored."""
    x, y, _ = probe.TASK.batch(np.random.default_rng(10_000 + 1), probe.EVAL_ROWS)
    wanted = torch.from_numpy(y)

    class Knows(torch.nn.Module):
        def forward(self, idx, all_logits):
            rows = [next(j for j in range(len(x)) if (x[j] == row.numpy()).all()) for row in idx]
            return torch.nn.functional.one_hot((wanted[rows] + self.off).clamp(min=0), 200).float(), None
    model = Knows()
    for model.off, share in ((0, 1.0), (1, 0.0)):
        assert probe.accuracy(model, 1) == share


@pytest.mark.filterwarnings('ignore:.*layer 0 owns')
def test_what_is_recalled_lies_beyond_local_reach(probe):
    assert probe.LOCAL_REACH == 10 * (probe.WINDOW - 1) < probe.TASK.min_distance - 1
    for settings in probe.RUNS.values():
        plan = probe.GPT(probe.GPTConfig(block_size=8, vocab_size=5, n_layer=probe.N_LAYER, n_head=2, n_embd=8,
                                         pos_embedding='rope', **settings)).plan
        assert sum(layer.kind == 'local' for layer in plan.layers) in (0, 10, 12)


@pytest.fixture
def made_up(probe, monkeypatch):
    """Rows as `run` makes them, without the training."""
    row, ran = probe.run('local-only', 1), []

    def make(arm, seed, reached=100):
        ran.append((arm, seed))
        return row | {'arm': arm, 'seed': seed, 'kv_bytes_bf16': 1234567, 'steps_to_95': reached, 'steps': 500,
                      'accuracy': 0.256}
    make.ran = ran
    monkeypatch.setattr(probe, 'run', make)
    return make


def test_the_table_has_a_row_per_run_in_the_arms_order(probe, made_up):
    rows = [made_up('local-only', 1, None), made_up('mha', 2, 300), made_up('mha', 1, 250)]
    lines = [line for line in probe.table(rows).splitlines() if line.startswith('| ')]
    assert lines[1:] == ['| mha | 1 | 1,234,567 | 250 | 500 | 25.6% |', '| mha | 2 | 1,234,567 | 300 | 500 | 25.6% |',
                         '| local-only | 1 | 1,234,567 | - | 500 | 25.6% |']


@pytest.mark.parametrize('argv', [['--arms', 'mha', 'mhaa'], ['--seeds', 'x']], ids=' '.join)
def test_wrong_arguments_are_refused_before_anything_is_written(probe, capsys, argv):
    with pytest.raises(SystemExit) as stop:
        probe.main(argv)
    assert stop.value.code == 2 and repr(argv[-1]) in capsys.readouterr().err
    assert not probe.RESULTS.exists()


def test_finished_runs_are_not_repeated_and_the_table_is_remade(probe, made_up):
    probe.main(['--arms', 'mha', 'local-only', '--seeds', '1', '2'])
    assert sorted(made_up.ran) == [('local-only', 1), ('local-only', 2), ('mha', 1), ('mha', 2)]
    kept = (probe.RESULTS / 'mha-seed1.json').read_bytes()
    made_up.ran.clear()
    probe.main(['--arms', 'mha', 'LLLLLG-tied', '--seeds', '1'])
    assert made_up.ran == [('LLLLLG-tied', 1)] and (probe.RESULTS / 'mha-seed1.json').read_bytes() == kept
    readme = probe.RESULTS / 'README.md'
    text = readme.read_text()
    assert text.count('\n| ') == 6 and 'LLLLLG-tied' in text  # the header and five runs
    readme.unlink()
    probe.main(['--table'])
    assert readme.read_text() == text and made_up.ran == [('LLLLLG-tied', 1)]
