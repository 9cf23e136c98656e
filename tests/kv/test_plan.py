"""The plan: which layers are local, whose K/V they read, bytes, and refused settings."""
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.gpt_config import GPTConfig
from kv import counts, weights
from kv.plan import KV_DTYPES, Slot, plan_kv
from model import GPT
from tests.helpers.mechanisms import CHANGES
from tests.helpers.mechanisms import STACK as SMALL_STACK
from tests.helpers.models import configs
from tests.helpers.reference import is_local, kv_owner

PLANS = configs(window_pattern='', kv_head_pattern='', kv_tied='', kv_latent=0, key_offset=False)
ROOT = Path(__file__).resolve().parents[2]
STACK = dict(layer_pattern='LLLLLG', kv_share='AABBBC', share_global_kv=True, n_kv_head=1,
             window_size=256, pos_embedding='rope')


def plan(**settings_):
    return plan_kv(GPTConfig(**settings_))


# -- which layer uses which cache ------------------------------------------------------------------

def test_published_example_is_the_drawing():
    p = plan(**STACK)
    assert [(s.index, s.kind, s.window, s.owner, s.layers) for s in p.slots] == [
        (0, 'local', 256, 0, (0, 1)), (1, 'local', 256, 2, (2, 3, 4)), (2, 'global', 0, 5, (5, 11)),
        (3, 'local', 256, 6, (6, 7)), (4, 'local', 256, 8, (8, 9, 10))]
    assert (p.n_head, p.n_kv_head, p.head_dim) == (12, 1, 64)


def test_defaults_are_vanilla_gpt2():
    p = plan()
    assert [(s.kind, s.layers) for s in p.slots] == [('global', (i,)) for i in range(12)]
    assert (p.n_head, p.n_kv_head, p.head_dim) == (12, 12, 64)
    assert p == p.vanilla()


@pytest.mark.filterwarnings('ignore:layer_pattern')
@given(config=PLANS)
def test_any_plan_follows_the_rule_text(config):
    p = plan_kv(config)
    for i, layer in enumerate(p.layers):
        assert layer.index == i
        expected = ('local', config.window_size) if is_local(config, i) else ('global', 0)
        assert (layer.kind, layer.window) == expected
        assert p.slots[layer.slot].owner == kv_owner(config, i)
        assert layer.owns == (kv_owner(config, i) == i)
    for s, slot in enumerate(p.slots):
        assert slot.index == s
        assert slot.layers == tuple(i for i, layer in enumerate(p.layers) if layer.slot == s)
        kinds = {(p.layers[i].kind, p.layers[i].window) for i in slot.layers}
        assert kinds == {(slot.kind, slot.window)}
    assert sorted(i for slot in p.slots for i in slot.layers) == list(range(config.n_layer))


# -- what is refused -------------------------------------------------------------------------------

ROPE = dict(n_head=4, n_embd=32, layer_pattern='LG', window_size=5, pos_embedding='rope')
LLG = dict(ROPE, layer_pattern='LLG')


@pytest.mark.parametrize('settings_, named', [
    (dict(layer_pattern='LXG', window_size=4), ["'LXG'", "'X'"]),
    (dict(layer_pattern=''), ["layer_pattern=''"]),
    (dict(layer_pattern='LLG', kv_share='AB', window_size=4), ["'AB'", "'LLG'", '2', '3']),
    (dict(layer_pattern='LG', kv_share='ABC', window_size=4), ["'ABC'", "'LG'", '3', '2']),
    (dict(layer_pattern='LLG', kv_share='ABB', window_size=4), ["'ABB'", "'LLG'", "'B'"]),
    (dict(n_head=12, n_kv_head=5), ['n_head=12', 'n_kv_head=5']),
    (dict(layer_pattern='LG'), ['window_size=0', "'LG'"]),
    (dict(layer_pattern='LG', window_size=-3), ['window_size=-3']),
    (dict(n_kv_head=-1), ['n_kv_head=-1']),
    (dict(rope_theta_global=5e5), ['rope_theta_global=500000.0', "'learned'"]),
    (dict(pos_embedding='rope', n_head=4, n_embd=12), ['head_dim=3', "'rope'"]),
    (dict(pos_embedding='rope', head_dim=7), ['head_dim=7', "'rope'"]),
    (dict(n_embd=10, n_head=4), ['n_embd=10', 'n_head=4']),
    (dict(pos_embedding='alibi'), ["'alibi'", "'rope'", "'learned'"]),
    (dict(gelu='fast'), ["'fast'", "'exact'", "'tanh'", "'relu2'"]),
    (dict(kv_quant_train='int4'), ["'int4'", "'int8'"]),
    (dict(ROPE, rope_fraction_global=0.5, pos_embedding='learned'),
     ['rope_fraction_global', 'learned']),
    (dict(ROPE, rope_fraction_global=1.5), ['rope_fraction_global=1.5', '0 to 1']),
    (dict(ROPE, rope_fraction_global=-0.1), ['rope_fraction_global=-0.1']),
    (dict(ROPE, rope_fraction_global=0.5, layer_pattern='L'), ['rope_fraction_global=0.5', "'L'"]),
    (dict(ROPE, rope_fraction_global=float('nan')), ['rope_fraction_global=nan']),
    (dict(ROPE, rope_fraction_global=0.0, rope_theta_global=9.0),
     ['rope_theta_global=9.0', 'angles']),
    (dict(ROPE, kv_tied='local'), ["kv_tied='local'", "'global'", "'all'"]),
    (dict(ROPE, kv_tied='global', layer_pattern='L'), ["kv_tied='global'", "layer_pattern='L'"]),
    (dict(ROPE, kv_latent=32), ['kv_latent=32', 'rope_fraction_global']),
    (dict(ROPE, kv_latent=12, rope_fraction_global=0.0), ['kv_latent=12', 'head_dim=8']),
    (dict(ROPE, kv_latent=32, pos_embedding='learned', layer_pattern='L'), ['kv_latent', "'L'"]),
    (dict(ROPE, kv_latent=32, rope_fraction_global=0.0, kv_tied='all'),
     ['kv_latent', "kv_tied='all'"]),
    (dict(ROPE, kv_latent=32, rope_fraction_global=0.0, key_offset=True),
     ['key_offset', 'kv_latent=32']),
    (dict(ROPE, key_offset=True, kv_tied='global'), ['key_offset', "kv_tied='global'"]),
    (dict(ROPE, key_offset=True, layer_pattern='L'), ['key_offset', "layer_pattern='L'"]),
    (dict(ROPE, key_offset=True, head_dim=6), ['key_offset', 'head_dim (it is 6)']),
    (dict(LLG, window_pattern='16,0'), ["window_pattern='16,0'", '2 numbers', "'LLG'"]),
    (dict(LLG, window_pattern='4,x,0'), ["'4,x,0'", "'x'"]),
    (dict(LLG, window_pattern='4,-1,0'), ["'-1'"]), (dict(LLG, window_pattern=','), ["''"]),
    (dict(LLG, window_pattern='4,4,4'), ["4 for a layer 'G'"]),
    (dict(LLG, window_pattern='4,0,0'), ["0 for a layer 'L'"]),
    (dict(LLG, window_pattern='4,9999999999,0'), ['2,147,483,647']),
    (dict(LLG, window_pattern=f'4,{10 ** 11},0'), ['too large']),
    (dict(LLG, window_pattern='4,5,0', kv_share='AAB'), ["'4,5,0'", '4 and 5', 'share']),
    (dict(LLG, kv_head_pattern='1,2,4', kv_share='AAB'), ["'1,2,4'", '1 and 2', 'share']),
    (dict(LLG, layer_pattern='GLG', window_size=4, kv_head_pattern='1,1,2', share_global_kv=True),
     ["'1,1,2'", '1 and 2', 'share']),
    (dict(LLG, kv_head_pattern='1,3,1'), ['n_head=4', 'multiple of 3']),
    (dict(LLG, kv_head_pattern='0,0,2', kv_latent=32, rope_fraction_global=0.0),
     ['kv_latent=32', "'0,0,2'"]),
])
def test_bad_settings_raise_and_name_the_values(settings_, named):
    with pytest.raises(ValueError) as caught:
        plan(**settings_)
    assert isinstance(caught.value, UserError)
    for text in named:
        assert text in str(caught.value)


@pytest.mark.parametrize('settings_, words', [
    (dict(STACK, layer_pattern='GLLLLL', kv_share='ABBCCC'), 'GLLLLL'),
    (dict(n_layer=4, layer_pattern='LLLLLG', window_size=8),
     "'LLLLLG' is longer than n_layer=4")])
def test_warnings_of_weak_long_term_memory(settings_, words):
    with pytest.warns(UserWarning, match=words):
        plan(**settings_)


def test_layers_that_differ():
    p = plan(**dict(LLG, n_layer=5, window_pattern='2,7,0', kv_head_pattern='1,0,2', n_kv_head=4))
    assert [(x.kind, x.window) for x in p.layers] == [
        ('local', 2), ('local', 7), ('global', 0), ('local', 2), ('local', 7)]
    assert [slot.n_kv_head for slot in p.slots] == [1, 4, 2, 1, 4]
    # 2 * Hkv * D * 4 bytes at each position
    assert p.nbytes(1, 10, 'float32') == 64 * (2 * 1 * 2 + 2 * 4 * 7 + 2 * 10)
    assert (p.local_reach, p.windows, p.heads_of_kv) == (2 * 1 + 2 * 6, '2 to 7', '1 to 4')
    assert plan(**dict(LLG, kv_share='GGA', share_global_kv=True)).slots[0].layers == (0, 1)
    few = plan(n_layer=6, n_head=4, layer_pattern='LLLLLLLG', window_size=2,
               kv_head_pattern='1,1,1,1,1,1,1,4')
    assert (few.n_kv_head, few.heads_of_kv) == (1, '1')
    same = plan(**dict(LLG, window_pattern='3, 3, 0', kv_head_pattern='2,2,2', n_kv_head=0))
    assert same == plan(**dict(LLG, window_size=3, n_kv_head=2))
    assert (same.windows, same.heads_of_kv) == ('3', '2') and plan().windows == ''


# -- bytes -----------------------------------------------------------------------------------------

@pytest.mark.parametrize('max_seq_len, ratio', [(1024, 72), (8192, 128)])
def test_gpt2_shape_is_72_and_128_times_smaller_at_equal_dtype(max_seq_len, ratio):
    p = plan(**STACK)
    for kv_dtype in KV_DTYPES:
        vanilla, ours = (q.nbytes(1, max_seq_len, kv_dtype) for q in (p.vanilla(), p))
        assert vanilla == ratio * ours
    assert p.nbytes(1, 1024, 'float32') == (4 * 256 + 1024) * 2 * 64 * 4 == 1_048_576


def test_a_window_longer_than_the_sequence_saves_nothing():
    p = plan(**dict(STACK, kv_share='', share_global_kv=False))
    assert p.slots[0].capacity(255) == 255
    assert p.slots[0].capacity(256) == p.slots[0].capacity(257) == 256
    assert p.factors(256, 'float32')['window'] == 1 and p.factors(257, 'float32')['window'] > 1


@pytest.mark.parametrize('kind', ('global', 'local'))
@pytest.mark.parametrize('max_seq_len', (3, 10))
def test_positions_are_those_that_appending_leaves(kind, max_seq_len):
    slot, held = Slot(0, kind, 4 * (kind == 'local'), 0, (0,), 1, 8), []
    for p in range(max_seq_len):
        assert slot.positions(p, max_seq_len) == held
        index = p % slot.capacity(max_seq_len)
        held[index:index + 1] = [p]
    assert slot.positions(max_seq_len, max_seq_len) == held


@pytest.mark.filterwarnings('ignore:layer_pattern')
@given(config=PLANS, batch=st.integers(1, 9), max_seq_len=st.integers(1, 99),
       kv_dtype=st.sampled_from(sorted(KV_DTYPES)), against=st.sampled_from(sorted(KV_DTYPES)))
def test_factors_multiply_to_the_ratios(config, batch, max_seq_len, kv_dtype, against):
    p = plan_kv(config)
    f = p.factors(max_seq_len, kv_dtype, against)
    ours, same, other = (q.nbytes(batch, max_seq_len, dtype) for q, dtype in
                         ((p, kv_dtype), (p.vanilla(), kv_dtype), (p.vanilla(), against)))
    assert f['heads'] * f['window'] * f['sharing'] == pytest.approx(same / ours, rel=1e-12)
    assert math.prod(f.values()) == pytest.approx(other / ours, rel=1e-12)
    assert f['heads'] == config.n_head / (config.n_kv_head or config.n_head)
    assert f['window'] >= 1 and f['sharing'] >= 1
    assert f['sharing'] > 1 or all(layer.owns for layer in p.layers)


# -- no torch --------------------------------------------------------------------------------------

def test_the_program_does_not_import_torch():
    program = ("import atexit, sys, runpy; sys.argv = ['kv', '--json=True']\n"
               "atexit.register(lambda: print('torch imported:', 'torch' in sys.modules))\n"
               "runpy.run_module('kv', run_name='__main__')")
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith('torch imported: False')


# -- weights and FLOPs by arithmetic match the model's ---------------------------------------------

@pytest.mark.parametrize('name', ['nothing', *CHANGES])
@pytest.mark.parametrize('bias', [False, True])
def test_names_and_shapes_of_weights(name, bias):
    config = GPTConfig(**SMALL_STACK | ({'nothing': {}} | CHANGES)[name] | {'bias': bias})
    plan, model = plan_kv(config), GPT(config)
    expected = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    assert weights.shapes(config, plan) == expected
    assert counts.parameters(config, plan) == model.get_num_params(non_embedding=False)
    for layer, block in zip(plan.layers, model.transformer.h):
        heads = [rows // plan.head_dim for rows in weights.c_attn_rows(plan, layer)]
        assert heads == block.attn.head_counts


@pytest.mark.parametrize('tokens, before', [(20, 0), (20, 7), (1, 30)])
@pytest.mark.parametrize('name', ['nothing', 'nothing shared', *CHANGES])
def test_prefill_flops_with_every_mechanism(name, tokens, before):
    """Matmuls with weights, counted as they run; attention from the shapes that it gets."""
    unshared = dict(kv_share='', share_global_kv=False)
    changes = {'nothing': {}, 'nothing shared': unshared} | CHANGES
    config = GPTConfig(**SMALL_STACK | changes[name])
    model, plan = GPT(config).eval(), plan_kv(config)
    cache = model.new_cache(1, before + tokens).fill_(before)
    plain, linear, absorbed, attended = cache.attend, 0, 0, 0

    def attend(layer, q, *args):
        nonlocal absorbed, attended
        width, (_, H, n, _) = q.size(3), q.shape
        if plan.slots[layer.slot].latent:  # q @ k_up and y @ v_up
            absorbed += 2 * 2 * H * n * plan.head_dim * width
        ends = range(before + tokens - n + 1, before + tokens + 1)
        attended += 4 * H * width * sum(min(end, layer.window or end)
                                        for end in ends)
        return plain(layer, q, *args)
    cache.attend = attend

    def count(module, args, y):
        nonlocal linear
        linear += 2 * args[0].numel() * module.out_features
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(count)
    with torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.int64), cache=cache)
    flops = counts.prefill_flops(config, plan, tokens, before)
    assert flops == linear + absorbed + attended
    assert (absorbed > 0) == bool(config.kv_latent)
