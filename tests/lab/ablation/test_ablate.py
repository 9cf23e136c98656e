"""ablate.py end to end: it trains, evaluates, resumes after a stop, and reports failures."""
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ablate
from config.errors import UserError
from config.folder_lock import only_writer
from interop.convert import convert_weights
from lab.ablation import convert
from lab.ablation.ladder import read_ladder
from lab.ablation.report import without_curves
from lab.ablation.results import Results
from training.checkpoint import load_checkpoint, save_checkpoint

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
speed = False
contexts = '32,64'
'''


@pytest.fixture
def ladder(tmp_path):
    """(arguments of ablate.py, folder of the results). No pictures, which take longer than all
    training in these tests."""
    path, folder = tmp_path / 'ablate_mine.py', tmp_path / 'results'
    path.write_text(LADDER)
    return [str(path), f'--folder={folder}', '--device=cpu', '--pictures=False'], folder


CONVERTED = """
batch_sizes = '1'
side_rows = {'converted': ('+ MQA', dict(converted_from='MHA', max_iters=4))}
side_seeds = '1'
"""


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """(arguments, folder, standard output) of a finished ladder with a converted row."""
    folder, out = tmp_path_factory.mktemp('ablate') / 'results', io.StringIO()
    path = folder.parent / 'ablate_mine.py'
    path.write_text(LADDER.replace('speed = False', 'repeats = 5') + CONVERTED)
    argv = [str(path), f'--folder={folder}', '--device=cpu']
    with contextlib.redirect_stdout(out):
        ablate.main([*argv, '--jobs=2', '--json=True'])
    return [*argv, '--pictures=False'], folder, out.getvalue()


@pytest.mark.slow
def test_a_ladder_is_trained_judged_and_reported_once(trained, capsys, monkeypatch):
    argv, folder, out = trained
    summary = json.loads(out.splitlines()[-1])
    names = [row['name'] for row in summary['rows']]
    assert names == ['MHA', '+ MQA', '+ int8 KV', 'converted']
    for row in summary['rows']:
        assert row['seeds'] == [1] and not row['seeds_missing']
        assert 0 <= row['recall']['accuracy']['4']['mean'] <= 1
    assert summary['rows'][2]['trained_as'] == '+ MQA'
    assert len(list((folder / 'runs').iterdir())) == 3
    # 2 layers of K and V, 2 or 1 heads of 8, in bfloat16; then in int8 with scales of 2 bytes
    assert [row['kv']['bytes_per_token'] for row in summary['rows']] == [128, 64, 40, 64]
    written = (folder / 'report.md').read_text()
    assert '![' not in written and not list(folder.glob('*.png'))  # a table tells it all
    assert '| + MQA |' in written and 'python train.py config/train_recall.py' in written
    assert len(summary['speed']['cells']) == 5 and '\nSpeed' in written and '\nSpeed' in out
    assert json.loads((folder / 'results.json').read_text()) == without_curves(summary)

    before = (folder / 'runs.jsonl').read_text()
    assert before.startswith('{"base":') and before.count('\n') == 5
    ablate.main(argv)
    assert (folder / 'runs.jsonl').read_text() == before
    argv = [*argv, '--dry_run=True']
    out = printed(capsys, argv)
    assert "seeds done [1], to do -" in out and 'of the core' not in out
    monkeypatch.setattr('lab.ablation.results.core_digest', lambda: 'changed')
    assert '5 of 5 results were measured with another version' in printed(capsys, argv)
    assert "seeds done -, to do [1]" in printed(capsys, [*argv, '--max_iters=13'])


def printed(capsys, argv):
    capsys.readouterr()
    ablate.main(argv)
    return capsys.readouterr().out


@pytest.mark.slow
def test_one_failing_row_is_shown_and_the_others_are_trained(ladder, capsys):
    """Its settings are valid, but not with this data."""
    argv, folder = ladder
    rows = """'+ odd': dict(learning_rate=1e30),
    '+ MQA': dict(n_kv_head=1, learning_rate=1e-3)"""
    text = LADDER.replace("'+ MQA': dict(n_kv_head=1)", rows) + 'max_skipped = 1\n'
    Path(argv[0]).write_text(text)
    with pytest.raises(SystemExit) as end:
        ablate.main([*argv, '--jobs=2'])
    assert end.value.code == 1
    out = capsys.readouterr()
    _, odd, fine, _ = json.loads((folder / 'results.json').read_text())['rows']
    assert fine['seeds'] == [1] and odd['seeds'] == []
    assert '+ odd, seed 1: failed: iteration 1: the loss is nan' in out.err
    assert '+ odd (seeds 1)' in out.out and '+ odd (seeds 1)' in (folder / 'report.md').read_text()


@pytest.mark.slow
@pytest.mark.parametrize('sent, status', [(signal.SIGINT, 130), (signal.SIGTERM, 143)],
                         ids=['Ctrl-C', 'SIGTERM'])
def test_stopped_it_goes_on_where_it_was(ladder, sent, status):
    argv, folder = ladder
    argv += ['--max_iters=700', '--lr_decay_iters=700', '--eval_interval=700', '--only=MHA',
             '--jobs=1']
    _, rows = read_ladder(argv, echo=False)
    run = Results(rows).out_dir(rows.rows['MHA'], 1)
    metrics = run / 'metrics.jsonl'
    process = subprocess.Popen(
        [sys.executable, ablate.__file__, *argv], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    deadline = time.time() + 120
    while not metrics.exists() or metrics.read_text().count('\n') < 20:
        assert process.poll() is None and time.time() < deadline, process.stdout.read()
        time.sleep(0.05)
    os.kill(process.pid, sent)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == status, out
    assert 'saved iteration' in (run / 'train.log').read_text() and (run / 'ckpt.pt').is_file()
    assert not (folder / 'runs.jsonl').exists() and metrics.read_text().count('\n') < 701

    ablate.main(argv)
    assert 'Resuming training from' in (run / 'train.log').read_text()
    found = [json.loads(line)['iter'] for line in metrics.read_text().splitlines()]
    assert found == list(range(701))
    assert list(Results(rows).runs()) == [('mha', 1)]


@pytest.mark.slow
def test_a_row_may_begin_with_the_converted_weights_of_another(trained):
    argv, folder, _ = trained
    found = json.loads((folder / 'results.json').read_text())['rows'][3]
    assert found['seeds'] == [1] and found['iterations'] == 4
    assert found['command'].count('python') == 2 and '--init_from=resume' in found['command']

    rows = read_ladder(argv, echo=False)[1]
    origin, row = rows.rows['MHA'], rows.rows['converted']
    origin_path, path = (Results(rows).out_dir(each, 1) / 'ckpt.pt' for each in (origin, row))
    convert.main(['converted', '1', *argv])
    finished, begun = load_checkpoint(origin_path), load_checkpoint(path)
    wanted = convert_weights(finished['model'], rows.trained_config(origin),
                             rows.trained_config(row))
    assert begun['iter_num'] == 0 and begun['model'].keys() == wanted.keys()
    assert all((begun['model'][name] == wanted[name]).all() for name in wanted)
    save_checkpoint(origin_path, finished | {'iter_num': 3})  # as if it had been stopped early
    with pytest.raises(UserError, match="is at iteration 3 of .*: train row 'MHA' to its end"):
        convert.main(['converted', '1', *argv])


@pytest.mark.parametrize('flags, wanted', [
    (['--seeds=2'], [('MHA', 2), ('+ MQA', 2), ('MHA', 3), ('converted', 3), ('again', 3)]),
    (['--only=again'], [('MHA', 3), ('converted', 3), ('again', 3)]),
    (['--only=+ MQA'], [('+ MQA', 1)]),
])
def test_what_a_row_begins_with_is_trained_for_it(ladder, flags, wanted):
    argv, _ = ladder
    Path(argv[0]).write_text(LADDER + """
side_rows = {'converted': ('+ MQA', dict(converted_from='MHA', max_iters=4)),
             'again': ('+ MQA', dict(converted_from='converted', max_iters=2))}
side_seeds = '3'
""")
    argv += flags
    _, rows = read_ladder(argv, echo=False)
    runs = ablate.jobs_of(rows, Results(rows), argv, ablate.chosen(rows))
    assert sorted((row.name, seed) for row, seed in runs) == sorted(wanted)


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
