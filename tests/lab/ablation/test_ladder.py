"""Ladders: rows add up from the one above, mistakes are named before anything is trained, equal trainings are found."""
import pytest

from config.errors import UserError
from kv.plan import plan_kv
from lab.ablation import ladder as ladder_module
from lab.ablation.ladder import Row, parameters, read_ladder

SMALL = '''
base = 'config/train_recall.py'
n_layer = 3
n_embd = 32
n_head = 4
block_size = 64
recall_task = 'distances=7,20'
'''
CONFIG = SMALL + '''
rows = {
    'vanilla GPT-2': {},
    '+ RoPE': dict(pos_embedding='rope'),
    '+ MQA': dict(n_kv_head=1),
    '+ windows': dict(layer_pattern='LLG', window_size=8),
    '+ wider MLP': dict(mlp_hidden='match'),
    '+ int8 KV': dict(kv_dtype='int8'),
    '+ int8 in training': dict(kv_quant_train='int8'),
}
side_rows = {
    'shared': ('+ windows', dict(kv_share='AAB')),
    'tied later': ('+ windows', dict(at_inference=dict(kv_share='AAB'))),
}
'''


@pytest.fixture
def ladder_of(tmp_path):
    def read(text=CONFIG, *flags):
        path = tmp_path / 'ablate_mine.py'
        path.write_text(text)
        return read_ladder([str(path), *flags], echo=False)[1]
    return read


def test_rows_add_up(ladder_of):
    ladder = ladder_of()
    config = ladder.config(ladder.rows['+ int8 KV'])
    assert (config.pos_embedding, config.n_kv_head, config.window_size, config.n_layer) == ('rope', 1, 8, 3)
    assert ladder.rows['+ MQA'].above == '+ RoPE' and ladder.rows['vanilla GPT-2'].above == ''
    assert ladder.config(ladder.rows['shared']).kv_share == 'AAB' and ladder.config(ladder.rows['+ MQA']).layer_pattern == 'G'
    assert ladder.rows['+ int8 in training'].kv_dtype == 'int8'
    assert ladder.s.name == 'ablate_mine'


def test_rows_with_the_same_weights_share_a_training(ladder_of):
    ladder = ladder_of()
    rows = ladder.rows
    assert ladder.trainer(rows['+ int8 KV']) is rows['+ wider MLP']
    assert ladder.trainer(rows['tied later']) is rows['+ windows']
    assert ladder.trainer(rows['+ int8 in training']) is rows['+ int8 in training']
    assert len({ladder.training(row) for row in rows.values()}) == 7
    assert len({ladder.fingerprint(row) for row in rows.values()}) == len(rows)


def test_int8_weights_are_another_row_of_the_same_training(ladder_of):
    ladder = ladder_of(CONFIG.replace("dict(kv_share='AAB')),", "dict(weight_dtype='int8')),"))
    windows, int8 = ladder.rows['+ windows'], ladder.rows['shared']
    assert int8.weight_dtype == 'int8' and windows.weight_dtype == 'auto'
    assert ladder.training(int8) == ladder.training(windows)
    assert ladder.fingerprint(int8) != ladder.fingerprint(windows)


def test_at_inference_changes_the_model_that_is_judged_alone(ladder_of):
    ladder = ladder_of()
    row = ladder.rows['tied later']
    assert ladder.trained_config(row).kv_share == '' and ladder.config(row).kv_share == 'AAB'


def test_matched_parameters(ladder_of):
    ladder = ladder_of()
    first, matched = (ladder.config(ladder.rows[name]) for name in ('vanilla GPT-2', '+ wider MLP'))
    assert matched.mlp_hidden > 128 and matched.mlp_hidden % 8 == 0
    step = 2 * 8 * 32 * 3  # parameters of 8 more units in 3 layers
    assert abs(parameters(matched) - parameters(first)) <= step / 2


def test_settings_of_the_ladder_hold_for_all_rows_and_flags_win(ladder_of):
    ladder = ladder_of(CONFIG, '--max_iters=7', '--n_embd=16')
    for row in ladder.rows.values():
        assert (ladder.settings(row).max_iters, ladder.settings(row).n_embd) == (7, 16)


def test_where_a_run_is_and_how_often_it_is_evaluated_is_no_other_training(ladder_of):
    plain, other = ladder_of(), ladder_of(CONFIG, '--log_interval=3', '--eval_iters=1', '--device=cpu')
    longer = ladder_of(CONFIG, '--max_iters=7')
    row = plain.rows['+ MQA']
    assert plain.training(row) == other.training(row) != longer.training(row)


@pytest.mark.parametrize('was, now, named', [
    ("base = 'config/train_recall.py'", '', 'base='),
    ("rows = {", "_rows = {", 'rows='),
    ("dict(n_kv_head=1)", "dict(n_kv_head=3)", r"row '\+ MQA': .*3"),
    ("dict(n_kv_head=1)", "dict(n_kv_heads=1)", r"row '\+ MQA': .*n_kv_head"),
    ("dict(n_kv_head=1)", "{}", r"row '\+ MQA' changes nothing"),
    ("dict(n_kv_head=1)", "1", r"row '\+ MQA': changes must be a dict"),
    ("kv_dtype='int8'", "kv_dtype='int7'", "kv_dtype='int7'"),
    ("kv_dtype='int8'", "weight_dtype='int4'", "weight_dtype='int4': allowed are 'auto', 'int8'"),
    ("('+ windows', dict(kv_share='AAB'))", "('windows', dict(kv_share='AAB'))", r"no row 'windows'.*'\+ windows'"),
    ("('+ windows', dict(kv_share='AAB'))", "dict(kv_share='AAB')", r"side_rows\['shared'\]"),
    ("dict(at_inference=dict(kv_share='AAB'))", "dict(at_inference=dict(kv_shares='AAB'))", "row 'tied later'.*kv_shares"),
    ("'shared':", "'+ MQA':", r"row '\+ MQA': is there twice"),
    ("'shared':", "'+ mqa!':", r"row '\+ mqa!': its file name would be that of '\+ MQA'"),
    ("'shared':", "'+':", "row '[+]': needs a name"),
    ("'shared':", "'sha\\nred':", 'in one line'),
    ("dict(n_kv_head=1)", "dict(n_kv_head=1, seeds=3)", r"row '\+ MQA': seeds=3: must be text"),
    ("dict(n_kv_head=1)", "dict(n_kv_head=1, seeds='1;2')", r"row '\+ MQA': seeds='1;2'"),
])
def test_mistakes_are_named(ladder_of, was, now, named):
    assert was in CONFIG
    with pytest.raises(UserError, match=named):
        ladder_of(CONFIG.replace(was, now, 1))


def test_seeds(ladder_of):
    ladder = ladder_of(CONFIG, '--seeds=4,5', '--side_seeds=6')
    assert ladder.seeds(ladder.rows['+ MQA']) == [4, 5] and ladder.seeds(ladder.rows['shared']) == [6]
    ladder = ladder_of(CONFIG.replace("kv_share='AAB')", "kv_share='AAB', seeds='7,8')", 1), '--seeds=4,5', '--side_seeds=6')
    assert ladder.seeds(ladder.rows['shared']) == [7, 8] and 'seeds' not in ladder.rows['shared'].changes
    with pytest.raises(UserError, match="row 'shared': seeds='7 8'"):
        ladder.seeds(Row('shared', '', True, {}, {}, seeds='7 8'))
    with pytest.raises(UserError, match="seeds='1;2'"):
        ladder = ladder_of(CONFIG, '--seeds=1;2')
        ladder.seeds(ladder.rows['+ MQA'])


def test_a_name_for_files():
    assert Row('+ KV shared by 2/3', '', False, {}, {}).slug == 'kv-shared-by-2-3'


@pytest.mark.parametrize('name', ['ablate_shakespeare', 'ablate_recall', 'ablate_smoke', 'ablate_gpt2', 'ablate_gpu_short',
                                  'ablate_long'])
def test_shipped_ladders_make_models(name, monkeypatch):
    """Whatever their data sets, which need not be prepared here."""
    monkeypatch.setattr(ladder_module, 'open_meta', lambda s, root: {'vocab_size': 65})
    ladder = read_ladder([f'config/{name}.py'], echo=False)[1]
    names = [row.name for row in ladder.rows.values() if not row.side]
    assert names[0] == ('RoPE + qk_norm MHA' if name == 'ablate_long' else 'vanilla GPT-2')
    assert ladder.rows[names[-1]].kv_dtype == 'int8'
    plan = plan_kv(ladder.config(ladder.rows[names[-1]]))
    assert plan.vanilla().nbytes(1, 1024, 'bfloat16') > 10 * plan.nbytes(1, 1024, 'int8')


def test_the_shakespeare_ladder_is_as_small_as_it_says(monkeypatch):
    """70 times at T, against vanilla in bfloat16; every row of the other ladder is there too."""
    monkeypatch.setattr(ladder_module, 'open_meta', lambda s, root: {'vocab_size': 65})
    text, recall = (read_ladder([f'config/ablate_{name}.py'], echo=False)[1] for name in ('shakespeare', 'recall'))
    config = text.config(text.rows['+ int8 KV'])
    plan = plan_kv(config)
    assert config.n_layer == 12 and config.n_head == 8
    assert plan.vanilla().nbytes(1, config.block_size, 'bfloat16') / plan.nbytes(1, config.block_size, 'int8') >= 70
    assert [name for name, row in recall.rows.items() if not row.side] == [n for n, row in text.rows.items() if not row.side]
    assert abs(parameters(config) / parameters(text.config(text.rows['+ qk_norm'])) - 1) < 0.003


@pytest.mark.parametrize('was, now, named', [
    ("dict(n_kv_head=1)", "dict(seed=5)", r"row '\+ MQA': seed is the same for all rows"),
    ("dict(n_kv_head=1)", "dict(init_from='gpt2')", r"row '\+ MQA': init_from is the same"),
    ("dict(n_kv_head=1)", "dict(dataset='text')", r"row '\+ MQA': dataset is the same"),
    ("dict(n_kv_head=1)", "dict(block_size=32)", r"row '\+ MQA': block_size is the same"),
    ("dict(n_kv_head=1)", "dict(recall_task='distances=3')", r"row '\+ MQA': recall_task is the same"),
    ("dict(at_inference=dict(kv_share='AAB'))", "dict(at_inference=1)", "row 'tied later': at_inference must be a dict"),
    ("dict(at_inference=dict(kv_share='AAB'))", "dict(at_inference=dict(qk_norm=True))", "row 'tied later': qk_norm=True"),
    ("'vanilla GPT-2': {}", "'vanilla GPT-2': dict(mlp_hidden='match')", 'matches the first row, which this is'),
    ("dict(n_kv_head=1)", "dict(n_kv_head=1, converted_from='MHA')", r"row '\+ MQA': converted_from='MHA': there is no such"),
    ("dict(kv_share='AAB'))", "dict(converted_from='vanilla GPT-2'))", "row 'shared': pos_embedding='rope'"),
    ("    '+ RoPE'", "    5", 'row 5: a name must be text'),
    ("    '+ RoPE'", "    'ладья'", "needs a name with letters"),
])
def test_rows_that_would_be_judged_on_the_wrong_weights_are_refused(ladder_of, was, now, named):
    assert was in CONFIG
    with pytest.raises(UserError, match=named):
        ladder_of(CONFIG.replace(was, now, 1))


def test_a_row_read_otherwise_has_the_converted_weights_of_the_row_above(ladder_of):
    text = CONFIG.replace("dict(n_kv_head=1),", "dict(n_kv_head=1, converted_from='+ RoPE'),\n    'x': dict(kv_dtype='int8'),\n"
                          "    'y': dict(max_iters=9, converted_from=''),")
    ladder = ladder_of(text)
    rows = ladder.rows
    assert ladder.trainer(rows['x']) is rows['+ MQA'] and ladder.depth(rows['x']) == 1
    assert ladder.depth(rows['y']) == 0 and ladder.training(rows['y']) != ladder.training(rows['x'])
    with pytest.raises(UserError, match="row 'y' is to be trained, but 'x' above it begins with the weights of"):
        ladder_of(text.replace(", converted_from=''", ''))


def test_the_batches_of_a_run_are_those_of_its_seed(ladder_of):
    ladder = ladder_of()
    assert ladder.arguments(ladder.rows['+ MQA'], 3)[-2:] == ['--seed=3', '--data_seed=3']
