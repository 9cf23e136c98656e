"""lab/scripts/soak.py: a short soak passes, and differences are detected."""
import json

import pytest
import torch

import train
from config.errors import UserError
from lab.scripts import soak
from training.checkpoint import save_checkpoint

SMALL = dict(n_layer=2, n_head=2, n_embd=128, batch_size=1, block_size=16, max_iters=36,
             lr_decay_iters=36, eval_interval=20, checkpoint_interval=5, eval_iters=1)


@pytest.fixture
def left_alone_here(monkeypatch):
    """Train the uninterrupted run in this process, which is faster."""
    process = soak.train_to_end

    def trained(folder, out_dir, show):
        if out_dir.name != 'alone':
            return process(folder, out_dir, show)
        with monkeypatch.context() as patch:
            patch.setattr(train, 'DATA_ROOT', folder / 'data')
            settings = soak.SETTINGS | dict(out_dir=out_dir)
            train.main([f'--{name}={value}' for name, value in settings.items()])
    monkeypatch.setattr(soak, 'train_to_end', trained)


@pytest.mark.slow
def test_a_short_soak(tmp_path, monkeypatch, capsys, left_alone_here):
    monkeypatch.setattr(soak, 'SETTINGS', soak.SETTINGS | SMALL)
    monkeypatch.setattr(soak, 'SPAN', 10.0)  # so that there are checkpoints before a kill
    monkeypatch.setattr(soak, 'STARTING', 1.0)
    status = soak.main(['--kills=2', f'--save={tmp_path}/soak.json'])
    found = json.loads((tmp_path / 'soak.json').read_text())
    assert (found['kills'], found['rows'], found['rows_that_differ']) == (2, 37, 0)
    assert found['same_weights'] and found['same_checkpoints']
    assert found['most_lost_by_one_kill'] <= 5
    kills = found['each']
    assert found['kills_inside_checkpoint_writing'] == sum(kill['inside'] for kill in kills) >= 1
    assert found['iterations_lost'] == sum(kill['iteration'] - kill['resumed'] for kill in kills)
    assert {'loss', 'lr', 'train_loss', 'val_loss'} <= set(found['compared'])
    assert found['each'][-1]['resumed'] > 0
    assert status == 0 and 'rows that differ' in capsys.readouterr().out


def test_a_run_that_fails_is_an_error_and_not_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, 'SETTINGS', soak.SETTINGS | dict(batch_size=0))
    with pytest.raises(UserError, match='ended with status 2: error: batch_size=0'):
        soak.train_to_end(tmp_path, tmp_path / 'out', lambda reached: None)


@pytest.fixture
def two_runs(tmp_path):
    """Two folders of finished runs that are the same except for clock times."""
    for name in ('one', 'other'):
        torch.manual_seed(0)
        weight, moment = torch.rand(3), torch.rand(3)
        save_checkpoint(tmp_path / name / 'ckpt.pt', {
            'model': {'w': weight}, 'optimizer': {'state': {0: {'exp_avg': moment}}},
            'iter_num': 2, 'model_args': {}, 'best_val_loss': 1.0, 'config': {}})
        rows = [{'iter': i, 'loss': 2.0 - i, 'lr': 0.1, 'time_ms': len(name) + i}
                for i in range(2)]
        text = ''.join(json.dumps(row) + '\n' for row in rows)
        (tmp_path / name / 'metrics.jsonl').write_text(text)
    return tmp_path / 'one', tmp_path / 'other'


def verdict(found):
    kills = {'kills': 2, 'most_lost_by_one_kill': 10, 'iterations_between_checkpoints': 10}
    return soak.passed(kills | found, 2)


def test_runs_that_differ_by_the_clock_alone_are_the_same(two_runs):
    (two_runs[1] / 'metrics_old.jsonl').write_text('{"iter": 0}\n')  # from a start that was killed
    found = soak.compare(*two_runs)
    assert (found['rows'], found['compared']) == (2, ['iter', 'loss', 'lr'])
    assert found['checkpoints'] == {'ckpt.pt': 2} and verdict(found)
    assert not verdict(found | {'kills': 1})
    assert not verdict(found | {'most_lost_by_one_kill': 11})


@pytest.mark.parametrize('part', ['loss', 'row lost', 'weight', 'moment', 'left behind'])
def test_any_difference_is_found(two_runs, part):
    metrics, path = two_runs[1] / 'metrics.jsonl', two_runs[1] / 'ckpt.pt'
    checkpoint = torch.load(path)
    if part == 'loss':
        metrics.write_text(metrics.read_text().replace('1.0', '1.0000000000000002'))
    elif part == 'row lost':
        metrics.write_text(metrics.read_text().replace('{"iter": 1', '{'))
    elif part == 'left behind':
        (two_runs[1] / '.ckpt.pt.9.tmp').write_bytes(b'half')
    else:
        moments = checkpoint['optimizer']['state'][0]
        tensor = checkpoint['model']['w'] if part == 'weight' else moments['exp_avg']
        tensor[1] += 1e-6
        torch.save(checkpoint, path)
    assert not verdict(soak.compare(*two_runs))
