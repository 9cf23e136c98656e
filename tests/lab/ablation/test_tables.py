"""Which rows each table and picture shows."""
import pytest

from lab.ablation import cost, tables
from lab.ablation.ladder import read_ladder
from lab.ablation.results import Results
from lab.ablation.summary import summarize
from tests.lab.ablation.test_ladder import CONFIG

SIDE = '''
side_rows = {
    'wider': ('+ MQA', dict(mlp_hidden=64)),
    'Muon': ('+ MQA', dict(optimizer='muon')),
    'slower': ('+ MQA', dict(learning_rate=1e-4)),
    'uptrained': ('+ MQA', dict(converted_from='+ RoPE', max_iters=2)),
    'int8': ('+ MQA', dict(kv_dtype='int8')),
}
'''
SIDE_NAMES = 'wider', 'Muon', 'slower', 'uptrained', 'int8'


@pytest.fixture
def summary(tmp_path):
    (tmp_path / 'ablate_mine.py').write_text(CONFIG + SIDE)
    argv = [str(tmp_path / 'ablate_mine.py'), f'--folder={tmp_path}', '--device=cpu',
            '--contexts=16', '--batch_sizes=1']
    ladder = read_ladder(argv, echo=False)[1]
    speed = cost.Speed(ladder)
    where = {'device': 'cpu', 'processor': 'x', 'threads': 1, 'torch': '2.13.0',
             'dtype': 'float32', 'shape': {}}
    train = {'tokens_per_second': {key: {'median': 1.0} for key in speed.trainers},
             'memory': {key: {'activations': 1, 'peak': 1} for key in speed.trainers}}
    prefill = {'ttft_ms': {key: {'median': 1.0} for key in speed.decoders}}
    measured = where | {'trains_as': speed.trains_as, 'decodes_as': speed.decodes_as, 'cells': [
        {'kind': 'train', 'context': 0, 'batch': 0, 'errors': {}} | train,
        {'kind': 'prefill', 'context': 16, 'batch': 1, 'errors': {}} | prefill]}
    return summarize(ladder, Results(ladder), measured, None,
                     lambda row: cost.kv_bytes(ladder, row, [16]))


def test_side_rows_have_a_table_of_their_own(summary):
    ladder, side, *_ = tables.grids(summary)
    names = [row['name'] for row in summary['rows'] if not row['side']]
    assert [row[0] for row in ladder.rows] == names
    assert [row[0].split(' (')[0] for row in side.rows] == list(SIDE_NAMES)
    assert 'against that' in side.columns and 'against above' in ladder.columns


def test_a_model_trained_in_another_way_is_not_shown_twice(summary):
    """Its cache and its speed are those of the row that it departs from; its optimizer's step is not."""
    assert {row['name'] for row in summary['rows'] if row['same_model']} == {'Muon', 'slower', 'uptrained'}
    grids = {grid.title.split(' ')[0].rstrip(':'): [row[0].split(' (')[0] for row in grid.rows]
             for grid in tables.grids(summary)}
    for title in ('KV', 'Speed'):
        assert grids[title][-2:] == ['wider', 'int8']
    assert grids['Training'][-2:] == ['wider', 'Muon']
