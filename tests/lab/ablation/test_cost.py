"""The cost of rows: allocated bytes, times measured in turns, reports of failed measurements."""
import json

import pytest

import ablate
from config.errors import UserError
from config.gpt_config import GPTConfig
from lab.ablation import cost, tables
from lab.ablation.ladder import read_ladder
from lab.ablation.results import Results
from lab.ablation.summary import summarize
from lab.benchmarks import clock
from model import GPT
from tests.lab.ablation.test_ladder import CONFIG
from tests.lab.ablation.test_ladder import SMALL as SMALL_MODEL

SMALL = ['--contexts=16,100', '--batch_sizes=2', '--batch_size=2', '--device=cpu']
THREE = SMALL_MODEL + """
rows = {
    'MHA': dict(pos_embedding='rope'),
    '+ MQA': dict(n_kv_head=1),
    '+ int8 KV': dict(kv_dtype='int8'),
}
side_rows = {'Muon': ('+ MQA', dict(optimizer='muon'))}
"""


@pytest.fixture
def ladder_of(tmp_path):
    def read(*flags, text=CONFIG):
        path = tmp_path / 'ablate_mine.py'
        path.write_text(text)
        return read_ladder([str(path), f'--folder={tmp_path}', *SMALL, *flags], echo=False)[1]
    return read


def test_bytes_by_hand(ladder_of):
    """3 layers of width 32, 4 heads of 8, T=64, W=8: MHA: 3 x 2 x 4 x 8 elements per position."""
    text = CONFIG + "rows['+ wider heads'] = dict(head_dim=16)\n"
    ladder = ladder_of(text=text)
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


def test_bytes_of_weights_and_flops_of_a_prompt_by_hand(ladder_of):
    text = CONFIG + "side_rows['W8'] = ('+ int8 KV', dict(weight_dtype='int8'))\n"
    ladder = ladder_of(text=text)
    vanilla, full, int8 = (cost.kv_bytes(ladder, ladder.rows[name], [16])
                           for name in ('vanilla GPT-2', '+ int8 KV', 'W8'))
    config = ladder.config(ladder.rows['vanilla GPT-2'])
    n_params = GPT(config).get_num_params(non_embedding=False)
    assert vanilla['weights'] == {'dtype': 'bfloat16', 'bytes': 2 * n_params}
    # the last layer's c_attn for all 16 tokens, the rest of that layer for one
    before = 16 * 2 * (2 * 12 * 32 ** 2 + 3 * 32 ** 2) + 2 * 9 * 32 ** 2
    keys = 4 * 32 * (2 * 16 * 17 // 2 + 16)
    assert vanilla['at'][16]['prefill_flops'] == before + keys + 2 * config.vocab_size * 32
    assert int8['weights'] == {'dtype': 'int8', 'bytes': full['weights']['bytes'] // 2}
    assert int8['at'] == full['at']


def test_rows_share_a_side_where_they_run_the_same_code_alone(ladder_of):
    text = CONFIG + "side_rows['W8'] = ('+ int8 KV', dict(weight_dtype='int8'))\n"
    speed = cost.Speed(ladder_of(text=text))
    decodes, trains = speed.decodes_as, speed.trains_as
    assert decodes['+ int8 KV'] == decodes['+ int8 in training'] != decodes['+ wider MLP']
    assert trains['+ int8 KV'] == trains['+ wider MLP'] != trains['+ int8 in training']
    assert decodes['tied later'] == decodes['shared']
    assert trains['tied later'] == trains['+ windows'] != trains['shared']
    assert decodes['W8'] != decodes['+ int8 KV'] and trains['W8'] == trains['+ int8 KV']


@pytest.fixture
def rounds(monkeypatch):
    """Measure only one round per side. Returns the list of the measurements' titles."""
    titles = []

    def alternate(sides, repeats, title):
        titles.append(title.split()[0])
        return {key: [run()] for key, run in sides.items()}
    monkeypatch.setattr(clock, 'alternate', alternate)
    return titles


@pytest.fixture
def too_large(monkeypatch, rounds):
    """Make caches of 100 tokens fail for all rows with as many K/V heads as query heads."""
    plain = cost.DecodeRound

    def decode(model, batch, *args):
        if args[0] == 100 and model.config.n_kv_head != 1:
            raise RuntimeError('no memory\nfor 100 tokens')
        return plain(model, batch, *args)
    monkeypatch.setattr(cost, 'DecodeRound', decode)


def test_a_failing_measurement_is_reported_and_the_others_are_made(ladder_of, too_large, capsys):
    ladder = ladder_of(text=THREE)
    speed = cost.Speed(ladder)
    found = speed.measure()
    assert 'timing 3 of 5: decoding at 100 tokens, batch 2\n' in capsys.readouterr().err
    cells = found['cells']
    kinds = ['decode', 'prefill', 'decode', 'prefill', 'train']
    assert [cell['kind'] for cell in cells] == kinds
    mha, mqa = speed.decodes_as['MHA'], speed.decodes_as['+ MQA']
    errors = [cell['errors'].get(mha) for cell in cells]
    assert errors == [None, None, 'no memory for 100 tokens', None, None]
    assert mqa in cells[2]['tpot_ms'] and mha not in cells[2]['tpot_ms']
    assert mqa not in cells[2]['errors'] and mha in cells[3]['ttft_ms']
    memory = cells[4]['memory']
    muon, adamw = (memory[speed.trains_as[name]]['peak'] for name in ('Muon', '+ MQA'))
    assert muon < adamw  # one average instead of two

    kv = {name: cost.kv_bytes(ladder, row, [16]) for name, row in ladder.rows.items()}
    summary = summarize(ladder, Results(ladder), found, None, lambda row: kv[row.name])
    json.dumps(summary)
    told = 'MHA: not timed (decode, 100 tokens, batch 2): no memory for 100 tokens'
    assert told in tables.shortcomings(summary)
    grids = {grid.title.split(':')[0]: grid.rows for grid in tables.grids(summary)}
    shown = {row[0]: row[3] for row in grids['Speed']}
    assert shown['MHA'] == '-' and float(shown['+ MQA']) > 0
    assert 'Muon' not in ' '.join(shown)  # decodes like the row above
    assert len(grids['Training']) == len(ladder.rows)
    assert all(float(cell.replace(',', '')) >= 0 for row in grids['Training'] for cell in row[1:])


def test_measurements_are_not_repeated(ladder_of, too_large, rounds):
    ladder = ladder_of(text=THREE)
    results = Results(ladder)
    assert ablate.measured_speed(ladder, results, False) is None
    whole = ablate.measured_speed(ladder, results, True)
    assert whole['cells'][2]['errors']  # and is not retried
    assert ablate.measured_speed(ladder, results, True) == whole and len(rounds) == 5

    # metrics from a different machine are used as they are, those of other models are not
    path = results.folder / 'speed.json'
    theirs = whole | {'processor': 'another'}
    path.write_text(json.dumps(theirs))
    assert ablate.measured_speed(ladder, results, True)['processor'] == 'another'
    path.write_text(json.dumps(theirs | {'fingerprint': 'of other models'}))
    assert ablate.measured_speed(ladder, results, False) is None


def test_figures_of_other_settings_do_not_count(ladder_of):
    changes = [], [], ['--dtype=bfloat16'], ['--contexts=16'], ['--batch_size=3'], ['--repeats=6']
    prints = [cost.Speed(ladder_of(*flags, text=THREE)).fingerprint for flags in changes]
    assert prints[0] == prints[1] and len(set(prints[1:])) == len(prints) - 1


@pytest.mark.parametrize('flag, named', [
    ('--repeats=1', 'repeats=1'), ('--contexts=abc', "contexts='abc'"),
    ('--eval_windows=-1', 'eval_windows=-1'), ('--jobs=0', 'jobs=0'),
    ("--shape={'n_layers': 3}", 'n_layers'), ('--shape=3', 'shape=3')])
def test_mistakes_are_named_before_anything_is_trained(ladder_of, flag, named):
    with pytest.raises(UserError, match=named):
        ladder_of(flag)


def test_a_digest_has_only_what_is_set():
    """A field that GPTConfig gets later, with a default, changes no earlier key."""
    assert cost.set_fields(GPTConfig()) == {}
    assert cost.set_fields(GPTConfig(n_layer=3)) == {'n_layer': 3}
