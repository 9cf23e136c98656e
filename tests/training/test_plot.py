"""The plot of metrics.jsonl: the curves, the written picture, the errors."""
import json
import math
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from training.plot import __main__ as plot
from training.loop.log import RunLog
from training.plot.__main__ import UNITS, read_run

PNG = b'\x89PNG\r\n\x1a\n'


def rows(n=60, every=1):
    """Rows of a run that logs every `every` iterations and evaluates every 20. An iteration has 100
    tokens and takes half a second."""
    for it in range(0, n + 1, every):
        loss = math.exp(-it / 9)
        row = dict(iter=it, loss=2 + loss, lr=1e-3, time_ms=500.0, tokens_per_second=200.0)
        yield row | (dict(train_loss=2.0, val_loss=2.1 + loss) if it % 20 == 0 else {})


def write(folder, lines):
    folder.mkdir(exist_ok=True)
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return str(folder)


@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / 'out', rows())


def test_x_counts_tokens_and_seconds_before_each_loss(tmp_path):
    folder = write(tmp_path / 'out', rows(every=10))
    for x, each in (('iter', 1), ('tokens', 100), ('time', 0.5)):
        assert read_run(folder, x)[0].tolist() == [each * it for it in range(0, 61, 10)]


def test_missing_and_infinite_values_are_gaps_and_a_cut_line_is_left_out(tmp_path):
    lines = list(rows(3)) + [dict(iter=4, loss=math.nan), dict(iter=5, loss=math.inf, lr=None)]
    folder = write(tmp_path / 'out', lines)
    with open(tmp_path / 'out' / 'metrics.jsonl', 'a') as file:
        file.write('{"iter": 6, "lo')
    _, loss, val_loss = read_run(folder)
    assert np.isnan(loss).tolist() == [False] * 4 + [True] * 2
    assert np.isnan(val_loss).tolist() == [False] + [True] * 5


@pytest.mark.parametrize('x, lines', [
    *((x, list(rows())) for x in UNITS),
    ('iter', [dict(iter=0, loss=2.0, grad_norm=0.0)]), ('iter', [dict(iter=0, val_loss=2.0)]),
    ('iter', [dict(iter=0, loss=math.nan), dict(iter=1, loss=math.nan)])])
@pytest.mark.filterwarnings('error::UserWarning', 'error::RuntimeWarning')
def test_every_axis_and_sparse_runs_can_be_drawn(tmp_path, capsys, monkeypatch, x, lines):
    folder = write(tmp_path / 'a$b$', lines)
    plot.main([folder, folder, f'--x={x}'])
    assert (tmp_path / 'a$b$' / 'loss.png').read_bytes().startswith(PNG)
    assert capsys.readouterr().out == f'wrote {folder}/loss.png\n'
    from matplotlib import pyplot
    assert not pyplot.get_fignums()  # the figure is closed
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    with pytest.raises(UserError, match='pip install matplotlib'):
        plot.main([folder])


@pytest.mark.parametrize('read, of_each_row', [
    (read_run, 80),  # five numbers, and their copies
    (lambda folder: RunLog(Path(folder), 10_000, [], True, False).file.close(), 0)])
def test_a_long_log_is_read_row_by_row(tmp_path, read, of_each_row):
    """Without its text and all values in memory at once."""
    n = 5000
    folder = write(tmp_path / 'out', (dict(iter=it, loss=1.0, note='x' * 500) for it in range(n)))
    tracemalloc.start()
    read(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500_000 + 2 * of_each_row * n
    assert (tmp_path / 'out' / 'metrics.jsonl').read_text().count('\n') == n


@pytest.mark.parametrize('content, argv, words', [
    (None, ['nowhere'], "nothing was logged in 'nowhere/metrics.jsonl'"),
    (b'{"iter": 0, "loss": [1]}\n', [], 'out/metrics.jsonl is not a metrics.jsonl'),
    (b'{"iter": 0, "loss": 1.0}\n', ['--x=tokens'], 'tokens_per_second: use --x=iter'),
    (None, ['--out=no/such/folder.png'], 'no/such/folder.png cannot be written')])
def test_what_is_refused(out, tmp_path, content, argv, words):
    if content is not None:
        (tmp_path / 'out' / 'metrics.jsonl').write_bytes(content)
    with pytest.raises(UserError, match=words):
        plot.main(['out', *argv])
    assert [path.name for path in tmp_path.rglob('*') if path.is_file()] == ['metrics.jsonl']
