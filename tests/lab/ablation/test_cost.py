"""The cost of rows: allocated bytes, times measured in turns and reported."""
import json

import ablate
from config.gpt_config import GPTConfig
from lab.ablation import cost, tables
from lab.ablation.results import Results
from lab.ablation.summary import summarize
from lab.benchmarks import clock
from tests.lab.ablation.conftest import CONFIG, SMALL

FLAGS = ['--contexts=16,100', '--batch_sizes=2', '--batch_size=2', '--device=cpu']
THREE = SMALL + """
rows = {
    'MHA': dict(pos_embedding='rope'),
    '+ MQA': dict(n_kv_head=1),
    '+ int8 KV': dict(kv_dtype='int8'),
}
side_rows = {'Muon': ('+ MQA', dict(optimizer='muon'))}
"""


def test_bytes_by_hand(ladder_of):
    """3 layers of width 32, 4 heads of 8, T=64, W=8: MHA: 3 x 2 x 4 x 8 elements per position."""
    text = CONFIG + "rows['+ wider heads'] = dict(head_dim=16)\n"
    ladder = ladder_of(text, *FLAGS)
    of = {name: cost.kv_bytes(ladder, row, [16]) for name, row in ladder.rows.items()}
    assert of['vanilla GPT-2']['at'][16]['bytes'] == 16 * 3 * 2 * 32 * 2
    assert of['+ MQA']['smaller'] == 4 and of['+ MQA']['bytes_per_token'] == 3 * 2 * 8 * 2
    assert of['+ MQA']['at'][64]['sequences_per_GB'] == 10 ** 9 // (64 * 96)
    assert of['+ windows']['at'][64]['bytes'] == (64 + 2 * 8) * 2 * 8 * 2
    assert of['+ int8 KV']['at'][64]['bytes'] == (64 + 2 * 8) * 2 * (8 + 2)
    assert of['tied later']['at'][64]['bytes'] == (64 + 8) * 2 * 8 * 2
    wider = of['+ wider heads']
    assert wider['at'][64]['bytes'] == (64 + 2 * 8) * 2 * (16 + 2)
    assert wider['smaller'] == 64 * 3 * 2 * 32 * 2 / wider['at'][64]['bytes']


def test_rows_share_a_side_where_they_run_the_same_code_alone(ladder_of):
    text = CONFIG + "side_rows['W8'] = ('+ int8 KV', dict(weight_dtype='int8'))\n"
    speed = cost.Speed(ladder_of(text, *FLAGS))
    decodes, trains = speed.decodes_as, speed.trains_as
    assert decodes['+ int8 KV'] == decodes['+ int8 in training'] != decodes['+ wider MLP']
    assert trains['+ int8 KV'] == trains['+ wider MLP'] != trains['+ int8 in training']
    assert decodes['tied later'] == decodes['shared']
    assert trains['tied later'] == trains['+ windows'] != trains['shared']
    assert decodes['W8'] != decodes['+ int8 KV'] and trains['W8'] == trains['+ int8 KV']


def test_a_measurement_is_reported_and_nothing_is_repeated(ladder_of, monkeypatch):
    monkeypatch.setattr(clock, 'alternate', lambda sides, *_: {  # one round per row
        key: [run()] for key, run in sides.items()})
    ladder = ladder_of(THREE, *FLAGS)
    results = Results(ladder)
    assert ablate.measured_speed(ladder, results, False) is None
    found = ablate.measured_speed(ladder, results, True)
    kinds = ['decode', 'prefill', 'decode', 'prefill', 'train']
    assert [cell['kind'] for cell in found['cells']] == kinds
    assert found['cells'][4]['rows']['Muon']['median'] > 0

    summary = summarize(ladder, results, found, None,
                        lambda row: cost.kv_bytes(ladder, row, [16]))
    table = tables.speeds(summary)
    assert table.columns == ('row', 'TPOT 16 B=2', 'TTFT 16', 'TPOT 100 B=2', 'TTFT 100',
                             'training tokens/s')
    assert all(float(row[3]) > 0 for row in table.rows)

    # metrics from a different machine are used as they are, those of other models are not
    path = results.folder / 'speed.json'
    theirs = found | {'processor': 'another'}
    path.write_text(json.dumps(theirs))
    assert ablate.measured_speed(ladder, results, True) == theirs
    path.write_text(json.dumps(theirs | {'fingerprint': 'of other models'}))
    assert ablate.measured_speed(ladder, results, False) is None


def test_figures_of_other_settings_do_not_count(ladder_of):
    """A field that GPTConfig gets later, with a default, changes nothing."""
    changes = [], [], ['--dtype=bfloat16'], ['--contexts=16'], ['--batch_size=3'], ['--repeats=6']
    prints = [cost.Speed(ladder_of(THREE, *FLAGS, *flags)).fingerprint for flags in changes]
    assert prints[0] == prints[1] and len(set(prints[1:])) == len(prints) - 1
    assert cost.set_fields(GPTConfig(n_layer=3)) == {'n_layer': 3}
