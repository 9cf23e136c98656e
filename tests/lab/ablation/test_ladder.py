"""Ladders: rows build on each other, mistakes are reported before training, runs are shared."""
import pytest

from common.errors import UserError
from engine.weights.quantize import n_parameters
from kv.plan import plan_kv
from lab.ablation import ladder as ladder_module
from lab.ablation.ladder import read_ladder
from tests.lab.ablation.conftest import CONFIG


def test_rows_add_up(ladder_of):
    text = CONFIG + "side_rows['own'] = ('shared', dict(qk_norm=True, seeds='7,8'))\n"
    ladder = ladder_of(text, '--seeds=4,5', '--side_seeds=6')
    rows = ladder.rows
    seeds = [ladder.seeds(rows[name]) for name in ('+ MQA', 'shared', 'own')]
    assert seeds == [[4, 5], [6], [7, 8]]
    config = ladder.config(rows['+ int8 KV'])
    assert (config.pos_embedding, config.n_kv_head, config.window_size) == ('rope', 1, 8)
    assert rows['+ MQA'].above == '+ RoPE' and rows['vanilla GPT-2'].above == ''
    assert ladder.config(rows['+ MQA']).layer_pattern == 'G'
    assert ladder.config(rows['shared']).kv_share == 'AAB'
    tied = rows['tied later']
    assert ladder.trained_config(tied).kv_share == '' and ladder.config(tied).kv_share == 'AAB'
    assert rows['+ int8 in training'].kv_dtype == 'int8'
    assert ladder.arguments(rows['+ MQA'], 3)[-2:] == ['--seed=3', '--data_seed=3']
    # '+ wider MLP' matches the number of parameters
    first, matched = (ladder.config(rows[name]) for name in ('vanilla GPT-2', '+ wider MLP'))
    assert matched.mlp_hidden > 128 and matched.mlp_hidden % 8 == 0
    step = 2 * 8 * 32 * 3  # parameters of 8 more units in 3 layers
    assert abs(n_parameters(matched, False) - n_parameters(first, False)) <= step / 2


def test_rows_with_the_same_weights_share_a_training(ladder_of):
    ladder = ladder_of(CONFIG + "side_rows['W8'] = ('+ windows', dict(weight_dtype='int8'))\n")
    rows = ladder.rows
    assert ladder.trainer(rows['+ int8 KV']) is rows['+ wider MLP']
    assert ladder.trainer(rows['tied later']) is ladder.trainer(rows['W8']) is rows['+ windows']
    assert ladder.trainer(rows['+ int8 in training']) is rows['+ int8 in training']
    assert len({ladder.training(row) for row in rows.values()}) == 7
    assert len({ladder.fingerprint(row) for row in rows.values()}) == len(rows)


TIED = "dict(at_inference=dict(kv_share='AAB'))"


@pytest.mark.parametrize('was, now, named', [
    ("base = 'config/train_recall.py'", '', 'base='),
    ("n_kv_head=1", "n_kv_head=3", r"row '\+ MQA': .*3"),
    ("n_kv_head=1", "n_kv_heads=1", r"row '\+ MQA': .*n_kv_head"),
    ("dict(n_kv_head=1)", "{}", r"row '\+ MQA' changes nothing"),
    ("('+ windows', dict(kv", "('windows', dict(kv", r"no row 'windows'.*'\+ windows'"),
    ("('+ windows', dict(kv_share='AAB'))", "dict(kv_share='AAB')", r"side_rows\['shared'\]"),
    (TIED, "dict(at_inference=dict(qk_norm=True))", "row 'tied later': qk_norm=True"),
    ("'shared':", "'+ mqa!':", r"its file name would be that of '\+ MQA'"),
    ("n_kv_head=1", "seed=5", r"row '\+ MQA': seed is the same for all rows"),
    ("'vanilla GPT-2': {}", "'vanilla GPT-2': dict(mlp_hidden='match')", 'matches the first row'),
    ('', "contexts = 'abc'\n", "contexts='abc'"),
    ('', "seeds = '1;2'\n", "seeds='1;2'"),
])
def test_mistakes_are_named(ladder_of, was, now, named):
    assert was in CONFIG
    with pytest.raises(UserError, match=named):
        ladder_of(CONFIG.replace(was, now, 1))
    with pytest.raises(UserError, match='give the config file of a ladder'):
        read_ladder([], echo=False)


@pytest.mark.parametrize('name', ['prices', 'smoke', 'gpu'])
def test_shipped_ladders_make_small_caches(name, monkeypatch):
    """Without their data sets, so that those need not be prepared here."""
    monkeypatch.setattr(ladder_module, 'open_meta', lambda s, root: {'vocab_size': 65})
    ladder = read_ladder([f'config/ablate_{name}.py'], echo=False)[1]
    last = [row for row in ladder.rows.values() if not row.side][-1]
    assert last.kv_dtype == 'int8'
    plan = plan_kv(ladder.config(last))
    assert plan.vanilla().nbytes(1, 1024, 'bfloat16') >= 10 * plan.nbytes(1, 1024, 'int8')
