"""Reports of results written by hand, with and without gaps."""
import pytest

from lab.ablation import report, tables
from lab.ablation.ladder import read_ladder
from lab.ablation.results import Results
from lab.ablation.summary import summarize
from tests.lab.ablation.conftest import SMALL
from training.plot.figures import plain_log_ticks, subplots

CONFIG = SMALL + '''
contexts = '64'
seeds = '1,2,3'
baseline = '+ RoPE'
rows = {
    'vanilla <GPT-2>': {},
    '+ RoPE': dict(pos_embedding='rope'),
    '+ MQA': dict(n_kv_head=1),
    '+ int8 KV': dict(kv_dtype='int8'),
}
side_rows = {
    'shorter': ('+ MQA', dict(max_iters=40)),
    'slower': ('+ MQA', dict(learning_rate=1e-4)),
    'later': ('+ MQA', dict(at_inference=dict(rope_theta=5000.0))),
}
side_seeds = '1'
'''
LOSSES = {
    'vanilla <GPT-2>': [2.0, 2.2, 2.1], '+ RoPE': [1.5, 1.75, 1.7], '+ MQA': [1.6, 1.8, 1.7],
    '+ int8 KV': [1.6, 1.8, 1.7], 'slower': [1.7], 'later': [1.65], 'shorter': [1.9]}


def write(ladder, results, found, result):
    """Write documents like those of lab/ablation/measure.py, with `result(name, x)`, for each x
    that was found with a seed of a row."""
    for name, each in found.items():
        row = ladder.rows[name]
        settings = vars(ladder.settings(row))
        n = settings['max_iters']
        training = {'curve': [[n, 1.0]], 'evaluations': [[n, 1.0, 1.0]], 'iterations': n,
                    'tokens': 64 * n}
        for seed, x in enumerate(each, 1):
            results.write(row, seed, {
                'fingerprint': ladder.fingerprint(row), 'trained_as': ladder.trainer(row).name,
                'params': 1000, 'settings': settings | {'seed': seed},
                'dtype': 'float32', 'hardware': 'cpu', 'torch': '2.13.0',
                'kv_dtype': 'int8' if row.kv_dtype == 'int8' else 'float32', 'windows': 4,
                'tokens': 256, 'val_loss': 1.0, 'val_loss_forward': 1.0, 'bits_per_byte': 0.5,
                'cache_minus_forward_largest': 0.0, 'training': training} | result(name, x))


@pytest.fixture
def folder(tmp_path):
    """A folder with the ladder and its results."""
    (tmp_path / 'ablate_mine.py').write_text(CONFIG)
    write(*opened(tmp_path), LOSSES, lambda name, loss: {
        'val_loss': loss, 'val_loss_forward': loss, 'bits_per_byte': loss / 2})
    return tmp_path


@pytest.fixture
def summary(folder):
    return summary_of(folder)


def opened(folder, *flags):
    argv = [str(folder / 'ablate_mine.py'), f'--folder={folder}', '--device=cpu', *flags]
    ladder = read_ladder(argv, echo=False)[1]
    return ladder, Results(ladder)


def summary_of(folder, *flags):
    ladder, results = opened(folder, *flags)
    return summarize(ladder, results)


def cells(grid):
    return {row[0]: dict(zip(grid.columns, row)) for row in grid.rows}


def test_every_figure_stands_in_its_column(summary):
    """Differences of MQA from RoPE: 0.1, 0.05 and 0. Their mean is 0.05, their standard deviation
    0.05, and half of the interval 4.303 * 0.05 / sqrt(3)."""
    ladder, side = map(cells, tables.grids(summary)[:2])
    assert ladder['+ MQA'] == {
        'row': '+ MQA', 'parameters': '1,000', 'KV bytes/token': '96', 'smaller': '4.0x',
        'val loss': '1.7000 (0.1000)', 'bits/byte': '0.850', 'against above': '+0.0500 ±0.1242',
        'against vanilla <GPT-2>': '-0.4000 ±0.0000*', 'against + RoPE': '+0.0500 ±0.1242',
        'seeds': '3'}
    assert ladder['+ RoPE']['against + RoPE'] == '-'
    assert ladder['+ RoPE']['against above'] == '-0.4500 ±0.1242*'  # stands among three
    one = side['shorter (from + MQA; 40 iterations)']
    assert (one['against that'], one['against + RoPE'], one['seeds']) == (
        '+0.3000 (n=1)', '+0.4000 (n=1)', '1')


@pytest.mark.parametrize('missing', ['+ RoPE', 'vanilla <GPT-2>', ''])
def test_ladders_with_gaps_have_reports(folder, missing):
    ladder, results = opened(folder)
    if missing:
        lines = results.path.read_text().splitlines(keepends=True)
        results.path.write_text(''.join(each for each in lines if f'"row":"{missing}"' not in each))
    else:
        results.path.unlink()
    summary = summary_of(folder)
    report.write_report(summary, folder)
    assert (folder / 'pareto.png').exists() == bool(missing)
    text = (folder / 'report.md').read_text()
    missing = missing or '+ MQA'
    assert cells(tables.headline(summary))[missing]['val loss'] == '-'
    assert f'{missing} (seeds 1, 2, 3)' in text
    assert ('Nothing was measured yet.' in text) == (missing == '+ MQA')


def test_identifiers_and_what_is_kept_of_the_gain(tmp_path):
    """Beyond 4 * 7 = 28 tokens the baseline is 1.0 and 0.8 nats better than local layers, the
    windows 0.5 and 0.592: they keep 50% and 74%."""
    (tmp_path / 'ablate_mine.py').write_text(SMALL + """
contexts = '64'
seeds = '1,2'
rows = {
    'MHA': dict(layer_pattern='G'),
    '+ window': dict(layer_pattern='LLG', window_size=8, n_layer=3),
}
side_rows = {'local': ('+ window', dict(layer_pattern='LLLL', kv_share='AABB', n_layer=4))}
""")
    def table_of(summary):
        return next(each for each in tables.grids(summary) if each.title.startswith('Identifiers'))
    ladder, results = opened(tmp_path)
    far = {'MHA': (1.0, 1.2), '+ window': (1.5, 1.408), 'local': (2.0, 2.0)}
    write(ladder, results, far, lambda name, nats: {'identifiers': {
        '8': {'count': 5, 'nats': 0.25}, '16': {'count': 1, 'nats': nats + 0.3},
        '32': {'count': 3, 'nats': nats - 0.1}, 'new': {'count': 9, 'nats': 7.0}}})
    summary = summary_of(tmp_path)
    rows = {row['name']: row['identifiers'] for row in summary['rows']}
    assert rows['+ window']['nats_beyond'] == pytest.approx({1: 1.4, 2: 1.308})
    assert rows['+ window']['kept']['each'] == pytest.approx([0.5, 0.74])
    table = table_of(summary)
    found = cells(table)['+ window']
    assert found['8 to 15: 5'] == '0.250' and found['new: 9'] == '7.000'
    assert found['kept'] == '62 %' and cells(table)['MHA']['kept'] == '100 %'
    assert 'from 32 tokens on' in table.title


@pytest.mark.parametrize('low, high, labels', [
    (1, 2000, ['1', '10', '100', '1,000']), (3.0, 3.3, ['3', '3.1', '3.2', '3.3'])])
def test_ticks_are_plain_numbers(low, high, labels):
    with subplots() as (_, axis):
        axis.set(xscale='log', xlim=(low, high))
        plain_log_ticks(axis.xaxis, low, high, subs=(1,))
        axis.figure.canvas.draw()
        shown = [label.get_text() for label in axis.get_xticklabels()]
    assert set(labels) <= set(shown)
