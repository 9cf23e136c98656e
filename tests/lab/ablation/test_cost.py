"""What rows cost: bytes are allocated, sides are the models that rows are, a measurement that fails is told."""
import json

import pytest
import torch

import ablate
from config.errors import UserError
from engine.weights import weights_dtype
from lab.ablation import cost, tables
from lab.ablation.ladder import read_ladder
from lab.ablation.results import Results
from lab.ablation.summary import summarize
from model import GPT
from tests.lab.ablation.test_ladder import CONFIG

SMALL = ['--contexts=16,100', '--batch_sizes=2', '--batch_size=2', '--device=cpu']


@pytest.fixture
def ladder_of(tmp_path):
    def read(*flags, text=CONFIG):
        (tmp_path / 'ablate_mine.py').write_text(text)
        return read_ladder([str(tmp_path / 'ablate_mine.py'), f'--folder={tmp_path}', *SMALL, *flags], echo=False)[1]
    return read


def test_bytes_by_hand(ladder_of):
    """3 layers of 32 wide, 4 heads of 8, T=64, W=8: MHA 3 x 2 x 4 x 8 elements a position."""
    ladder = ladder_of()
    of = {name: cost.kv_bytes(ladder, row, [16]) for name, row in ladder.rows.items()}
    assert of['vanilla GPT-2']['at'][16]['bytes'] == 16 * 3 * 2 * 32 * 2
    assert of['+ MQA']['smaller'] == 4 and of['+ MQA']['bytes_per_token'] == 3 * 2 * 8 * 2
    assert of['+ windows']['at'][64]['bytes'] == (64 + 2 * 8) * 2 * 8 * 2
    assert of['+ int8 KV']['at'][64]['bytes'] == (64 + 2 * 8) * 2 * (8 + 2) and of['+ int8 KV']['dtype'] == 'int8'
    assert of['tied later']['at'][64]['bytes'] == (64 + 8) * 2 * 8 * 2
    assert of['+ MQA']['at'][64]['sequences_per_GB'] == 10 ** 9 // (64 * 96)


def test_bytes_of_weights_and_flops_of_a_prompt_by_hand(ladder_of):
    ladder = ladder_of(text=CONFIG + "side_rows['int8 weights'] = ('+ int8 KV', dict(weight_dtype='int8'))\n")
    of = {name: cost.kv_bytes(ladder, row, [16]) for name, row in ladder.rows.items()}
    row = ladder.rows['vanilla GPT-2']
    model, vocab_size = GPT(ladder.config(row)), ladder.config(row).vocab_size
    assert of['vanilla GPT-2']['weights'] == {'dtype': 'bfloat16', 'bytes': 2 * model.get_num_params(non_embedding=False)}
    # c_attn of the last layer for all 16 tokens, the rest of it for one
    before = 16 * 2 * (2 * 12 * 32 ** 2 + 3 * 32 ** 2) + 2 * 9 * 32 ** 2
    keys = 4 * 32 * (2 * 16 * 17 // 2 + 16)
    assert of['vanilla GPT-2']['at'][16]['prefill_flops'] == before + keys + 2 * vocab_size * 32
    full, int8 = of['+ int8 KV'], of['int8 weights']
    assert int8['weights'] == {'dtype': 'int8', 'bytes': full['weights']['bytes'] // 2} and int8['at'] == full['at']


def test_a_row_with_int8_weights_is_timed_with_them(ladder_of, once):
    ladder = ladder_of(text=CONFIG + "side_rows['int8 weights'] = ('+ int8 KV', dict(weight_dtype='int8'))\n")
    speed = cost.Speed(ladder)
    assert speed.decodes_as['int8 weights'] != speed.decodes_as['+ int8 KV']
    assert speed.trains_as['int8 weights'] == speed.trains_as['+ int8 KV']
    assert not speed.measure()['cells'][0]['errors']
    speed.device, speed.dtype, speed.models = torch.device('cpu'), torch.float32, {}
    stored = {name: weights_dtype(speed._model(speed.decodes_as[name])) for name in ('+ int8 KV', 'int8 weights')}
    assert stored == {'+ int8 KV': 'float32', 'int8 weights': 'int8'}


def test_bytes_are_compared_with_the_first_rows_shape(ladder_of):
    ladder = ladder_of(text=CONFIG + "rows['+ wider heads'] = dict(head_dim=16, kv_dtype='int8')\n")
    found = cost.kv_bytes(ladder, ladder.rows['+ wider heads'], [64])
    assert found['at'][64]['bytes'] == (64 + 2 * 8) * 2 * (16 + 2)
    assert found['smaller'] == 64 * 3 * 2 * 32 * 2 / found['at'][64]['bytes']


def test_rows_share_a_side_where_they_run_the_same_code_alone(ladder_of):
    speed = cost.Speed(ladder_of())
    decodes, trains = speed.decodes_as, speed.trains_as
    assert decodes['+ int8 KV'] == decodes['+ int8 in training'] != decodes['+ wider MLP']
    assert trains['+ int8 KV'] == trains['+ wider MLP'] != trains['+ int8 in training']
    assert decodes['tied later'] == decodes['shared'] and trains['tied later'] == trains['+ windows'] != trains['shared']


def test_speed_is_measured_for_every_row_and_shown(ladder_of, monkeypatch, capsys):
    ladder = ladder_of()
    speed = cost.Speed(ladder).measure()
    assert [cell['kind'] for cell in speed['cells']] == ['decode', 'prefill', 'decode', 'prefill', 'train']
    results = Results(ladder)
    summary = summarize(ladder, results, speed, None, lambda row: cost.kv_bytes(ladder, row, [16]))
    grids = {grid.title.split(':')[0]: grid for grid in tables.grids(summary)}
    assert {'Speed', 'Training'} <= grids.keys() and 'float32' in grids['Speed'].title
    for title, left_out in (('Speed', 0), ('Training', 1)):  # what is tied after training trains as the row above
        assert len(grids[title].rows) == len(ladder.rows) - left_out
        assert all(float(cell.replace(',', '')) >= 0 for row in grids[title].rows for cell in row[1:])
    json.dumps(summary)
    activations = dict(zip(ladder.rows, (row[2] for row in grids['Training'].rows)))
    assert activations['+ int8 KV'] == activations['+ wider MLP']


def test_steps_are_those_of_each_rows_optimizer(ladder_of, once):
    pytest.importorskip('torchao')
    ladder = ladder_of(text=CONFIG + "side_rows['Muon'] = ('+ MQA', dict(optimizer='muon'))\n"
                                     "side_rows['int8 products'] = ('+ MQA', dict(int8_training=True))\n")
    speed = cost.Speed(ladder)
    speed.device, speed.dtype = torch.device('cpu'), torch.float32
    figures = speed._train()
    of = {name: speed._steps(speed.trains_as[name]) for name in ('+ MQA', 'Muon', 'int8 products')}
    assert [type(x.optimizer).__name__ for x in of.values()] == ['AdamW', 'CombinedOptimizer', 'AdamW']
    assert [type(x.model.transformer.h[0].mlp.c_fc).__name__ for x in of.values()] == ['Linear', 'Linear', 'Int8Linear']
    assert not figures['errors']
    peak = {name: figures['memory'][speed.trains_as[name]]['peak'] for name in of}
    assert peak['Muon'] < peak['+ MQA']  # one average in place of two


@pytest.fixture
def once(monkeypatch):
    """A round is enough."""
    monkeypatch.setattr(cost.clock, 'alternate', lambda sides, *_: {key: [run()] for key, run in sides.items()})


@pytest.fixture
def too_large(monkeypatch, once):
    """Caches of 100 tokens fail for all rows with as many K/V heads as query heads."""
    plain = cost.DecodeRound

    def decode(model, batch, *args):
        if args[0] == 100 and model.config.n_kv_head != 1:
            raise RuntimeError('no memory\nfor 100 tokens')
        return plain(model, batch, *args)
    monkeypatch.setattr(cost, 'DecodeRound', decode)


def test_what_does_not_fit_is_told_and_the_others_are_measured(ladder_of, too_large):
    ladder = ladder_of()
    speed = cost.Speed(ladder)
    found = speed.measure()
    cells = found['cells']
    vanilla, mqa = (speed.decodes_as[name] for name in ('vanilla GPT-2', '+ MQA'))
    assert [cell['errors'].get(vanilla) for cell in cells] == [None, None, 'no memory for 100 tokens', None, None]
    assert mqa in cells[2]['tpot_ms'] and vanilla not in cells[2]['tpot_ms'] and mqa not in cells[2]['errors']
    assert vanilla in cells[3]['ttft_ms'] and speed.trains_as['vanilla GPT-2'] in cells[4]['tokens_per_second']
    summary = summarize(ladder, Results(ladder), found, None, lambda row: cost.kv_bytes(ladder, row, [16]))
    assert 'vanilla GPT-2: not timed (decode, 100 tokens, batch 2): no memory for 100 tokens' in tables.shortcomings(summary)
    shown = {row[0]: row[3] for grid in tables.grids(summary) if grid.title.startswith('Speed') for row in grid.rows}
    assert shown['vanilla GPT-2'] == '-' and float(shown['+ MQA']) > 0


def test_a_model_that_cannot_be_made_leaves_the_others(ladder_of, monkeypatch, once):
    plain = cost.GPT

    def gpt(config):
        if config.n_kv_head != 1:
            raise MemoryError
        return plain(config)
    monkeypatch.setattr(cost, 'GPT', gpt)
    speed = cost.Speed(ladder_of())
    for cell in speed.measure()['cells']:
        keys = speed.trains_as if cell['kind'] == 'train' else speed.decodes_as
        assert cell['errors'] == dict.fromkeys((keys['vanilla GPT-2'], keys['+ RoPE']), 'MemoryError')


def test_what_is_measured_is_saved_as_it_comes_and_not_measured_again(ladder_of, too_large, tmp_path):
    """Stopped in the third figure, which fails later; it is not tried again."""
    ladder = ladder_of()
    results, kinds = Results(ladder), []

    class Counted(cost.Speed):
        def _turns(self, makers, title):
            kinds.append(title.split()[0])
            if kinds == ['decoding', 'prompts', 'decoding']:
                raise KeyboardInterrupt
            return super()._turns(makers, title)

    def measured(measure=True):
        kinds.clear()
        return ablate.measured_speed(ladder, results, measure)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, 'Speed', Counted)
        with pytest.raises(KeyboardInterrupt):
            measured()
        first = measured(measure=False)
        assert len(first['cells']) == 2 and kinds == []
        kinds.append('')
        second = ablate.measured_speed(ladder, results, True)
        assert kinds[1:] == ['decoding', 'prompts', 'training'] and second['cells'][:2] == first['cells']
        assert second['cells'][2]['errors'] and measured() == second and kinds == []
        part = second | {'cells': second['cells'][:1] + second['cells'][3:]}
        (results.folder / 'speed.json').write_text(json.dumps(part))
        kinds[:] = ['decoding']
        with pytest.raises(KeyboardInterrupt):  # in the third one again; what was there is there still
            ablate.measured_speed(ladder, results, True)
        assert [cell['kind'] for cell in measured(measure=False)['cells']] == ['decode', 'prefill', 'prefill', 'train']


def test_figures_of_another_machine_count_as_they_are_and_are_not_mixed(ladder_of, once):
    speed = cost.Speed(ladder_of())
    whole = speed.measure() | {'processor': 'of somebody else'}
    assert speed.is_whole(speed.of(whole)) and speed.of(whole)['processor'] == 'of somebody else'
    assert speed.of(whole | {'fingerprint': 'of others'}) is None
    part = whole | {'cells': whole['cells'][:2]}
    assert not speed.is_whole(part)
    assert all(ours != theirs for ours, theirs in zip(speed.measure(part)['cells'], part['cells']))


def test_figures_of_other_settings_do_not_count(ladder_of):
    prints = [cost.Speed(ladder_of(*flags)).fingerprint for flags in (
        [], [], ['--dtype=bfloat16'], ['--contexts=16'], ['--batch_size=3'], ['--repeats=6'],
        ["--shape={'n_embd': 64}"], ['--recompute=block'])]
    assert prints[0] == prints[1] and len(set(prints[1:])) == len(prints) - 1


def test_another_shape_matches_its_parameters_anew(ladder_of):
    ladder = ladder_of("--shape={'n_embd': 64}")
    row = ladder.rows['+ wider MLP']
    assert ladder.config(row).n_embd == 32 and ladder.config(row, ladder.s.shape).n_embd == 64
    assert ladder.config(row, ladder.s.shape).mlp_hidden > 256 > ladder.config(row).mlp_hidden > 128


@pytest.mark.parametrize('flags, named', [
    (['--repeats=1'], 'repeats=1'), (['--contexts=abc'], "contexts='abc'"), (['--eval_windows=-1'], 'eval_windows=-1'),
    (['--jobs=0'], 'jobs=0'), (["--shape={'n_layers': 3}"], 'n_layers'), (['--shape=3'], 'shape=3')])
def test_mistakes_are_named_before_anything_is_trained(ladder_of, flags, named):
    with pytest.raises(UserError, match=named):
        ladder_of(*flags)
