"""Reports of runs written by hand: each figure stands in its column, and ladders with gaps have reports too."""
import csv
import json
import re

import pytest
from matplotlib import pyplot

import ablate
from config.errors import UserError
from lab.ablation import cost, pictures, report, tables
from lab.ablation.ladder import read_ladder
from lab.ablation.results import Results
from lab.ablation.summary import paired_difference, recall_of, summarize
from tests.lab.ablation.test_ladder import SMALL

CONFIG = SMALL + '''
speed = False
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
    'uptrained': ('+ MQA', dict(converted_from='+ RoPE', max_iters=40)),
    'slower': ('+ MQA', dict(learning_rate=1e-4)),
    'later': ('+ MQA', dict(at_inference=dict(rope_theta=5000.0))),
    'uptrained on': ('uptrained', dict(converted_from='+ RoPE', kv_quant_train='int8', max_iters=40)),
}
side_seeds = '1'
'''
LOSSES = {'vanilla <GPT-2>': [2.0, 2.2, 2.1], '+ RoPE': [1.5, 1.75, 1.7], '+ MQA': [1.6, 1.8, 1.7],
          '+ int8 KV': [1.6, 1.8, 1.7], 'slower': [1.7], 'later': [1.65], 'uptrained': [1.9], 'uptrained on': [1.95]}


def run_of(ladder, row, seed, loss):
    """What lab/ablation/measure.py writes."""
    settings = vars(ladder.settings(row)) | {'seed': seed}
    iterations = settings['max_iters']
    curve = [[i, loss + 1 - i / iterations] for i in range(0, iterations + 1, 10)]
    return {'row': row.name, 'seed': seed, 'fingerprint': ladder.fingerprint(row), 'trained_as': ladder.trainer(row).name,
            'params': 1000, 'params_all': 1000, 'settings': settings, 'dtype': 'float32', 'hardware': 'cpu', 'torch': '2.13.0',
            'kv_dtype': 'int8' if row.kv_dtype == 'int8' else 'float32', 'windows': 4, 'tokens': 256,
            'val_loss': loss, 'val_loss_forward': loss, 'cache_minus_forward_largest': 0.0, 'bits_per_byte': loss / 2,
            'loss_by_position': [loss] * 64,
            'training': {'curve': curve, 'evaluations': [[i, x, x] for i, x in curve], 'iterations': iterations,
                         'tokens': 64 * iterations}}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'ablate_mine.py').write_text(CONFIG)
    ladder, results = opened(tmp_path)
    for name, losses in LOSSES.items():
        for seed, loss in enumerate(losses, 1):
            results.write(ladder.rows[name], seed, run_of(ladder, ladder.rows[name], seed, loss))
    return tmp_path


def opened(folder, *flags):
    ladder = read_ladder([str(folder / 'ablate_mine.py'), f'--folder={folder}', '--device=cpu', *flags], echo=False)[1]
    return ladder, Results(ladder)


def summary_of(folder, *flags):
    ladder, results = opened(folder, *flags)
    return summarize(ladder, results, None, None, lambda row: cost.kv_bytes(ladder, row, [64]))


def cells(grid):
    return {row[0]: dict(zip(grid.columns, row)) for row in grid.rows}


def test_every_figure_stands_in_its_column(folder):
    """Differences of MQA from RoPE: 0.1, 0.05, 0; mean 0.05, sd 0.05, half of the interval 4.303 * 0.05 / sqrt(3)."""
    ladder, side = map(cells, tables.grids(summary_of(folder))[:2])
    assert ladder['+ MQA'] == {
        'row': '+ MQA', 'parameters': '1,000', 'KV bytes/token': '96', 'smaller': '4.0x', 'val loss': '1.7000 (0.1000)',
        'bits/byte': '0.850', 'against above': '+0.0500 ±0.1242', 'against vanilla <GPT-2>': '-0.4000 ±0.0000',
        'against + RoPE': '+0.0500 ±0.1242', 'seeds': '3'}
    assert ladder['+ RoPE']['against + RoPE'] == ladder['vanilla <GPT-2>']['against above'] == '-'
    assert ladder['+ RoPE']['against above'] == '-0.4500 ±0.1242'
    one = side['uptrained (from + MQA; 40 iterations)']
    assert (one['against that'], one['against + RoPE'], one['seeds']) == ('+0.3000 (n=1)', '+0.4000 (n=1)', '1')


def test_the_loss_stands_second_and_pictures_before_tables(folder):
    """As a phone shows them; the summary in sentences is on top."""
    summary = summary_of(folder)
    assert tables.headline(summary).columns[:2] == ('row', 'val loss')
    report.write_report(summary, folder)
    for name, picture, table in (('report.html', '<img', '<table'), ('report.md', '![', '| row |')):
        text = (folder / name).read_text()
        assert text.index("'int8 KV', the last row".replace("'", '&#x27;' if name.endswith('html') else "'")) \
            < text.index(picture) < text.index(table)


def test_the_summary_says_what_the_seeds_cannot_tell(folder):
    """Its differences from RoPE are 0.1, 0.05 and 0, and RoPE's from vanilla -0.5, -0.45, -0.4."""
    saved, cost_, steps = tables.in_short(summary_of(folder))
    assert "'int8 KV', the last row of the ladder, holds" in saved and 'times fewer KV bytes at T=64' in saved
    assert '+0.0500 ±0.1242 against \'RoPE\': not distinguishable.' in cost_
    assert steps == "Of the 3 steps down the ladder, 1 has an interval that excludes zero: 'RoPE' (lower loss)."


@pytest.mark.parametrize('each, text, told', [
    ([-0.01], '-0.0100 (n=1)', 'too few'), ([-0.02753, -0.02765], '-0.0275, -0.0277 (n=2)', 'too few'),
    ([-0.01, -0.01, -0.04], '-0.0200 ±0.0430', 'all 3 differences are negative (sign test: p = 0.25)'),
    ([-0.01, 0.01, -0.03], '-0.0100 ±0.0497', 'not distinguishable'), ([-0.03, -0.031, -0.029], '-0.0300 ±0.0025', 'excludes'),
    ([-0.00001], '0.0000 (n=1)', 'too few')])
def test_differences_in_words(each, text, told):
    found = paired_difference(dict(enumerate(each)), dict.fromkeys(range(len(each)), 0.0))
    assert tables.plus_minus(found) == text
    assert told in tables.verdict(found)


def test_iterations_are_the_ladders(folder):
    """Side rows say their own."""
    summary = summary_of(folder)
    assert summary['facts']['iterations'] == [400]
    assert 'uptrained (from + MQA; 40 iterations)' in cells(tables.headline(summary, side=True))


def test_a_flat_loss_by_position_is_told(folder):
    summary = summary_of(folder)
    assert not any('position' in line for line in tables.caveats(summary))
    next(row for row in summary['rows'] if row['name'] == '+ RoPE')['loss_by_position'] = [2.0] * 16 + [1.5] * 240
    assert any('beyond 16 tokens' in line for line in tables.caveats(summary))


def test_seeds_on_the_command_line_leave_the_report_as_it_is(folder):
    assert tables.headline(summary_of(folder, '--seeds=1')) == tables.headline(summary_of(folder))
    found = summary_of(folder, '--seeds=4')
    assert found['rows'][0]['seeds'] == [1, 2, 3] and found['rows'][0]['seeds_missing'] == [4]


@pytest.mark.parametrize('missing', ['+ RoPE', 'vanilla <GPT-2>', '+ MQA'])
def test_ladders_with_gaps_have_reports(folder, missing):
    ladder, results = opened(folder)
    for path in results.folder.glob(f'measured/{ladder.rows[missing].slug}-seed*.json'):
        path.unlink()
    summary = summary_of(folder)
    report.write_report(summary, folder)
    assert cells(tables.headline(summary))[missing]['val loss'] == '-'
    assert f'not trained yet: {missing} (seeds 1, 2, 3)' in (folder / 'report.md').read_text()


def test_the_page_shows_names_as_they_are(folder):
    report.write_report(summary_of(folder), folder)
    page = (folder / 'report.html').read_text()
    assert 'vanilla &lt;GPT-2&gt;' in page and '<GPT-2>' not in page
    for text in (page.replace('&#x27;', "'"), (folder / 'report.md').read_text()):
        assert 'the losses of these rows were computed through a cache in float32' in text
    assert json.loads((folder / 'results.json').read_text())['rows'][0]['judged_through'] == ['float32']


def test_recovery_is_shown_beside_what_it_came_from_and_the_same_memory(folder):
    """Of the seed that was converted; the row above is no such thing where it was converted itself or has another memory."""
    rows = {row['name']: row for row in summary_of(folder)['rows']}
    origin = {'mean': 1.5, 'iterations': 400}
    assert rows['uptrained']['recovery'] == {'origin': origin, 'scratch': {'mean': 1.6, 'iterations': 400}}
    assert rows['uptrained on']['recovery'] == {'origin': origin}


def test_curves_of_other_windows_are_not_compared(folder):
    ladder, results = opened(folder)
    row = ladder.rows['+ MQA']
    for seed in (1, 2, 3):
        found = results.read(row, seed)
        found['settings']['eval_iters'] += seed > 1
        results.write(row, seed, found)
    gap = next(row for row in summary_of(folder)['rows'] if row['name'] == '+ MQA')['gap']
    assert gap[-1][0] == 400 and gap[-1][1:] == [pytest.approx(0.1)] * 3  # seed 1 alone


def test_recall_is_paired_by_seed(folder):
    """W=8: two local layers reach 2 * 7 = 14. The baseline names 96% at 7, and 96%, 98%, 100% at 20."""
    text = (folder / 'ablate_mine.py').read_text() + "rows['+ window'] = dict(layer_pattern='LLG', window_size=8)\n"
    (folder / 'ablate_mine.py').write_text(text)
    ladder, results = opened(folder)
    shares = {'vanilla <GPT-2>': [0.5] * 3, '+ RoPE': [0.96, 0.98, 1.0], '+ window': [0.95, 0.99], 'uptrained': [0.99]}
    for name, far in shares.items():
        for seed, share in enumerate(far, 1):
            found = run_of(ladder, ladder.rows[name], seed, 1.0)
            found['recall'] = {'accuracy': {'7': 0.96, '20': share}, 'rows': 256, 'local_reach': 14 * (name == '+ window')}
            results.write(ladder.rows[name], seed, found)
    grid = tables.recalls(summary_of(folder))
    found = cells(grid)
    assert grid.columns[:3] == ('row', '7 back', '20 back') and grid.columns[3] == 'beyond 14, less + RoPE'
    assert [found[name]['beyond 14, less + RoPE'] for name in ('+ RoPE', '+ window',
                                                                  'uptrained (from + MQA; 40 iterations)')] == [
        '-', '-1.0, +1.0 (n=2)', '+3.0 (n=1)']
    assert found['+ window']['20 back'] == '97.0 (2.8)' and found['+ window']['seeds'] == '2'


def test_recall_of_another_ladder_stands_beside_these_rows(folder):
    with pytest.warns(UserWarning, match='run that ladder first'):
        assert recall_of(opened(folder, '--recall=other')[0], folder / 'mine') is None
    known = {'seeds': [1], 'baseline_known': True}
    (folder / 'other').mkdir()
    document = {'rows': [{'name': '+ MQA', 'recall': known}, {'name': '+ RoPE'}]}
    (folder / 'other' / 'results.json').write_text(json.dumps(document))
    ladder = opened(folder, '--recall=other')[0]
    assert recall_of(ladder, folder / 'mine') == {'+ MQA': known}
    del known['baseline_known']
    (folder / 'other' / 'results.json').write_text(json.dumps(document))
    with pytest.raises(UserError, match='other/results.json is of an older version'):
        recall_of(ladder, folder / 'mine')


def test_distances_that_the_baseline_did_not_learn_are_marked(folder):
    ladder, results = opened(folder)
    for path in results.folder.glob('measured/*.json'):
        path.unlink()
    for name, far in (('+ RoPE', 0.94), ('+ MQA', 1.0)):
        found = run_of(ladder, ladder.rows[name], 1, 1.0)
        found['recall'] = {'accuracy': {'7': 0.95, '20': far}, 'rows': 256, 'local_reach': 0}
        results.write(ladder.rows[name], 1, found)
    grid = tables.recalls(summary_of(folder, '--seeds=1'))
    assert grid.columns == ('row', '7 back', '20 back*', 'seeds') and 'less than 95% right, and' in grid.title
    results.path(ladder.rows['+ RoPE'], 1).unlink()
    grid = tables.recalls(summary_of(folder))
    assert grid.columns == ('row', '7 back*', '20 back*', 'seeds') and 'or is not measured yet' in grid.title


def test_what_could_not_be_timed_is_told(folder):
    summary = summary_of(folder)
    summary['rows'][1]['speed'] = [{'kind': 'decode', 'context': 4096, 'batch': 16, 'errors': 'no memory'}]
    rows = {row['name']: row for row in summary['rows']}
    rows['slower']['speed'] = [{'kind': 'decode', 'context': 64, 'batch': 1, 'errors': 'as the row above'},
                               {'kind': 'train', 'context': 0, 'batch': 0, 'errors': 'no such optimizer'}]
    told = tables.shortcomings(summary)
    assert '+ RoPE: not timed (decode, 4,096 tokens, batch 16): no memory' in told
    assert [line for line in told if 'slower' in line] == ['slower: not timed (train, its batch): no such optimizer']


def test_a_dry_run_tells_what_a_chosen_row_needs(folder, capsys):
    ladder, results = opened(folder)

    def todo(*flags):
        ablate.main([str(folder / 'ablate_mine.py'), f'--folder={folder}', '--dry_run=True', *flags])
        found = re.findall(r'^(.*): seeds done .*, to do (\S+|\[.*\]) \(', capsys.readouterr().out, re.MULTILINE)
        return {name: which for name, which in found if which != '-'}
    for name, seed in (('+ RoPE', 1), ('uptrained', 1), ('+ MQA', 2)):
        results.path(ladder.rows[name], seed).unlink()
    assert todo('--only=uptrained') == {'+ RoPE': '[1]', 'uptrained': '[1]'}
    assert todo() == {'+ RoPE': '[1]', 'uptrained': '[1]', '+ MQA': '[2]'}  # 'later' has its weights, and wants seed 1 alone


def test_the_main_table_is_written_for_papers(folder):
    summary = summary_of(folder)
    report.write_report(summary, folder)
    grid = tables.headline(summary)
    written = list(csv.DictReader((folder / 'table.csv').read_text().splitlines()))
    assert [row['row'] for row in written] == [row['name'] for row in summary['rows']]
    for cells, row in zip(written, summary['rows']):
        found = row.get('against_baseline')
        assert float(cells['kv_bytes_per_token']) == row['kv']['bytes_per_token']
        assert cells['val_loss'] == (str(row['val_loss']['mean']) if 'val_loss' in row else '')
        assert cells['against_baseline'] == (str(found['mean']) if found else '')
        assert bool(cells['against_baseline_half_95']) == bool(found and len(found['each']) > 2)
    grid.rows = [('a_b & 5% ±1 <x>\\',)]
    assert r'a\_b \& 5\% $\pm$1 $<$x$>$\textbackslash{} \\' in grid.latex()
    assert (folder / 'table.tex').read_text().startswith(r'\begin{tabular}{lrrrrrrrrr}')


# -- pictures ---------------------------------------------------------------------------------------------------------

@pytest.fixture
def drawn(monkeypatch):
    """What each picture shows: name -> its figure's axes, as they were saved."""
    seen, savefig = [], pyplot.Figure.savefig
    monkeypatch.setattr(pyplot.Figure, 'savefig', lambda figure, *args, **keys: (
        savefig(figure, *args, **keys), seen.append((figure.axes, [text for axis in figure.axes for text in axis.texts])))[0])

    def draw(summary):
        seen.clear()
        return dict(zip(pictures.draw_all(summary), seen))
    return draw


def short_run(folder, iterations):
    """The same ladder, evaluated only at these iterations."""
    ladder, results = opened(folder)
    for row in ladder.rows.values():
        for seed in range(1, 4):
            if found := results.read(row, seed):
                found['training']['evaluations'] = [[i, 4.0 - i / 400, 4.0 - i / 400] for i in iterations]
                results.write(row, seed, found)
    return summary_of(folder)


@pytest.mark.parametrize('kind, begins', [('svg', b'<?xml'), ('pdf', b'%PDF')])
def test_pictures_for_papers(folder, kind, begins):
    summary = summary_of(folder)
    report.write_report(summary, folder, also_as=kind)
    made = {path.stem for path in folder.glob('*.png')}
    assert made and made == {path.stem for path in folder.glob(f'*.{kind}')}
    first = (folder / f'talk.{kind}').read_bytes()
    assert first.startswith(begins)
    report.write_report(summary, folder, also_as=kind)
    assert kind == 'svg' or (folder / f'talk.{kind}').read_bytes() == first
    report.write_report(summary, folder)
    assert made == {path.stem for path in folder.glob('*.png')} and not list(folder.glob(f'*.{kind}'))


def test_single_evaluations_are_points_and_none_is_no_picture(folder, drawn):
    shown = drawn(short_run(folder, [0, 400]))
    for name in ('curves', 'gaps'):
        axis = shown[name][0][0]
        lines = [line for line in axis.lines if not line.get_label().startswith('_')]
        low, high = axis.get_ylim()
        assert lines and all(line.get_marker() == 'o' for line in lines)
        assert all(low <= y <= high for line in lines for y in line.get_ydata())
    summary = short_run(folder, [0])
    assert not {'curves', 'gaps'} & drawn(summary).keys()
    report.write_report(summary, folder)
    assert 'no pictures of the losses while training' in (folder / 'report.md').read_text()
    assert pictures.not_drawn(short_run(folder, [0, 400])) == [
        'pictures of training show 1 evaluation after the first step: lower eval_interval for curves']
    assert not pictures.not_drawn(short_run(folder, [0, 100, 200, 400]))


def test_a_cut_axis_says_so(folder, drawn):
    (axis,), _ = drawn(summary_of(folder))['curves']
    assert axis.get_ylim()[1] < 3.1 == pytest.approx(max(axis.lines[0].get_ydata()))
    assert 'above the picture' in axis.get_xlabel()


def test_recovery_names_an_origin_once_on_a_linear_axis(folder, drawn):
    (axis,), _ = drawn(summary_of(folder))['recovery']
    labels = [line.get_label() for line in axis.lines]
    assert len(labels) == len(set(labels)) and '+ RoPE (400 iterations)' in labels and axis.get_yscale() == 'linear'


def test_line_ends_are_labelled_apart_from_one_another(folder, drawn):
    _, texts = drawn(summary_of(folder))['positions']
    places = sorted(text.xyann[1] for text in texts)
    assert {text.get_text() for text in texts} >= {'+ RoPE', '+ MQA', 'vanilla <GPT-2>'}
    assert all(b - a > 0.05 for a, b in zip(places, places[1:]))


def test_axes_of_time_have_plain_numbers(folder, drawn):
    summary = summary_of(folder)
    for k, row in enumerate(summary['rows']):
        row['speed'] = [{'kind': 'decode', 'context': 64, 'batch': 1, 'tpot_ms': {'median': 11 + k / 2}}]
    (axis,), _ = drawn(summary)['decode']
    ticks = [tick.get_text() for tick in axis.get_yticklabels()]
    assert axis.get_ylabel() == 'ms per token, 1 sequence' and all(re.fullmatch(r'[\d.,]+', tick) for tick in ticks), ticks


def test_a_picture_for_talks_names_a_few_rows(folder, drawn):
    """From the baseline on; a row of two seeds has no bar and is hollow."""
    (axis,), texts = drawn(summary_of(folder))['talk']
    names = [text.get_text().split('\n')[0] for text in texts]
    assert names == ['+ int8 KV', '+ MQA', 'baseline:'] and axis.get_legend() is None
    assert len(axis.containers) == 3 and sum(bar.has_yerr for bar in axis.containers) == 2


def test_rows_of_one_seed_are_hollow(folder, drawn):
    axes, _ = drawn(summary_of(folder))['pareto']
    hollow = {bar.get_label().split('  ')[1]: bar[0].get_markerfacecolor() == 'none' for bar in axes[0].containers}
    assert hollow['later, n=1'] and not hollow['+ MQA, n=3']


def test_recall_is_drawn_as_bars_with_a_dot_for_each_seed(folder, drawn):
    summary = summary_of(folder)
    for row in summary['rows']:
        row['recall'] = {'accuracy': {'7': {'mean': 0.5, 'sd': 0.1, 'each': [0.4, 0.6]}}, 'local_reach': 0, 'seeds': [1, 2],
                         'baseline': '+ RoPE', 'baseline_known': True, 'learned': [], 'beyond': []}
    (axis,), _ = drawn(summary)['recall']
    assert len(axis.patches) == len(summary['rows']) and len(axis.lines[0].get_xdata()) == 2
