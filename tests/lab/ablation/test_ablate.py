"""ablate.py end to end: it trains, evaluates, resumes after a stop, and reports failures. The smoke
ladder on real text: every row measured, every table and picture made."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ablate
from common.errors import UserError
from common.folder_lock import only_writer
from lab.ablation.ladder import read_ladder
from lab.ablation.results import Results

LADDER = '''
base = 'config/train_recall.py'
n_layer = 2
n_embd = 16
n_head = 2
block_size = 32
batch_size = 4
recall_task = 'distances=4,12'
max_iters = 12
lr_decay_iters = 12
warmup_iters = 2
eval_interval = 6
eval_iters = 1
log_interval = 1
rows = {
    'MHA': dict(pos_embedding='rope'),
    '+ MQA': dict(n_kv_head=1),
    '+ int8 KV': dict(kv_dtype='int8'),
}
seeds = '1'
contexts = '32,64'
'''


@pytest.fixture
def ladder(tmp_path):
    """(arguments of ablate.py, folder of the results). No pictures, which take longer than all
    training in these tests."""
    path, folder = tmp_path / 'ablate_mine.py', tmp_path / 'results'
    path.write_text(LADDER)
    return [str(path), f'--folder={folder}', '--device=cpu', '--pictures=False'], folder


@pytest.mark.slow
def test_a_ladder_is_trained_judged_and_reported_once(ladder, capsys, monkeypatch):
    argv, folder = ladder
    argv.remove('--pictures=False')
    out = printed(capsys, [*argv, '--jobs=2', '--json=True'])
    summary = json.loads(out.splitlines()[-1])
    assert [row['name'] for row in summary['rows']] == ['MHA', '+ MQA', '+ int8 KV']
    for row in summary['rows']:
        assert row['seeds'] == [1] and not row['seeds_missing']
        assert 0 <= row['recall']['accuracy']['4']['mean'] <= 1
    assert summary['rows'][2]['trained_as'] == '+ MQA'
    assert len(list((folder / 'runs').iterdir())) == 2
    # 2 layers of K and V, 2 or 1 heads of 8, in bfloat16; then in int8 with scales of 2 bytes
    assert [row['kv']['bytes_per_token'] for row in summary['rows']] == [128, 64, 40]
    written = (folder / 'report.md').read_text()
    assert '![' not in written and not list(folder.glob('*.png'))  # a table tells it all
    assert '| + MQA |' in written and 'python train.py config/train_recall.py' in written
    assert json.loads((folder / 'results.json').read_text()) == summary

    before = (folder / 'runs.jsonl').read_text()
    assert before.startswith('{"base":') and before.count('\n') == 4
    ablate.main(argv)
    assert (folder / 'runs.jsonl').read_text() == before
    argv = [*argv, '--dry_run=True']
    out = printed(capsys, argv)
    assert "seeds done [1], to do -" in out and 'of the core' not in out
    monkeypatch.setattr('lab.ablation.results.core_digest', lambda: 'changed')
    assert '3 of 3 results were measured with another version' in printed(capsys, argv)
    assert "seeds done -, to do [1]" in printed(capsys, [*argv, '--max_iters=13'])


def printed(capsys, argv):
    capsys.readouterr()
    ablate.main(argv)
    return capsys.readouterr().out


@pytest.mark.parametrize('flags, wanted', [
    (['--seeds=2'], [('MHA', 2), ('+ MQA', 2), ('other', 3)]), (['--only=other'], [('other', 3)]),
    (['--only=+ MQA'], [('+ MQA', 1)])])
def test_rows_and_seeds_that_are_asked_for_are_trained(ladder, flags, wanted):
    argv, _ = ladder
    Path(argv[0]).write_text(LADDER + """
side_rows = {'other': ('+ MQA', dict(max_iters=4))}
side_seeds = '3'
""")
    argv += flags
    _, rows = read_ladder(argv, echo=False)
    runs = ablate.jobs_of(rows, Results(rows), argv, ablate.chosen(rows))
    assert [(row.name, seed) for row, seed in runs] == wanted


def test_a_second_one_in_a_folder_and_a_missing_matplotlib_are_told_first(ladder, monkeypatch):
    argv, folder = ladder
    with only_writer(folder, ''), pytest.raises(UserError, match='another --folder'):
        ablate.main(argv)
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    with pytest.raises(UserError, match=r"need matplotlib: pip install .*--pictures=False"):
        ablate.main([*argv, '--pictures=True'])
    assert not (folder / 'runs').exists()
    ablate.main([*argv, '--report_only=True'])
    assert (folder / 'report.md').is_file() and not list(folder.glob('*.png'))


@pytest.mark.slow
def test_the_smoke_ladder(tmp_path):
    command = [sys.executable, 'ablate.py', 'config/ablate_smoke.py', f'--folder={tmp_path}',
               '--device=cpu', '--json=True']
    run = subprocess.run(command, cwd=Path(ablate.__file__).parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout.splitlines()[-1])
    rows = {row['name']: row for row in summary['rows']}
    assert len(rows) == 5
    for row in rows.values():
        assert row['seeds'] == [1, 2] and not row['seeds_missing']
        assert 1.5 < row['val_loss']['mean'] < 4 and row['val_loss']['sd'] > 0
        assert row['cache_minus_forward_largest'] < (2e-3 if row['name'] == '+ int8 KV' else 1e-4)
        bits = row['val_loss']['mean'] / 0.693147  # one byte per character
        assert row['bits_per_byte']['mean'] == pytest.approx(bits, rel=0.01)
    int8, plain = rows['+ int8 KV'], rows['+ window, wider MLP']
    assert int8['trained_as'] == plain['name'] and 0 < abs(int8['against_above']['mean']) < 0.01
    assert int8['kv']['smaller'] > 14 and int8['against_first']['seeds'] == [1, 2]
    assert {path.stem for path in tmp_path.glob('*.png')} == {'pareto'}
    report = (tmp_path / 'report.md').read_text()
    assert '\n## Rows' in report and report.count('![') == 1
    for title in ('The ladder', 'KV cache'):
        assert f'\n{title}' in report and title in run.stdout
