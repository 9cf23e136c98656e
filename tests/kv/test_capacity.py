"""Capacity by arithmetic: parameters, keys and FLOPs match the model's."""
import json
import math

import pytest
import torch
from hypothesis import example, given

from config.errors import UserError
from config.gpt_config import GPTConfig
from kv import capacity
from kv.plan import plan_kv
from model import GPT
from tests.helpers.mechanisms import CHANGES, STACK
from tests.helpers.models import FULL_STACK, configs


@pytest.mark.filterwarnings('ignore:layer_pattern')
@given(configs())
@example(GPTConfig(**FULL_STACK))
@example(GPTConfig(n_layer=3, n_head=4, n_embd=24, vocab_size=30, block_size=16))
def test_parameters_are_the_models(config):
    n_params = GPT(config).get_num_params(non_embedding=False)
    assert capacity.parameters(config, plan_kv(config)) == n_params


def said(capsys, *flags):
    capsys.readouterr()
    capacity.main([*flags, '--json=True'])
    out = capsys.readouterr().out
    return json.loads(out.splitlines()[-1]), out


MINE = ['config/train_gpt2_mqa_local.py', '--context=4000', '--message_tokens=20',
        '--new_tokens=100', '--memory=10GB',
        '--bandwidth=1TB', '--flops=1e14', '--price=3.6', '--utilization=0.5',
        '--requests_per_second=1000']


def test_a_gpus_figures_by_hand(capsys):
    found, out = said(capsys, *MINE, '--hit_rate=1', '--away=10')
    ours, vanilla = found['ours'], found['vanilla']
    n = ours['parameters']
    assert ours['weights_bytes'] == 2 * n and ours['kv_bytes'] == 2 * 64 * 2 * (4 * 256 + 4120)
    assert ours['batch'] == ours['sequences'] == int((9e9 - 2 * n) // ours['kv_bytes'])
    read = 2 * 64 * 2 * (10 * 256 + 2 * 4070)
    computed = (2 * n + 4 * 12 * 64 * (10 * 256 + 2 * 4070)) * ours['batch']
    assert ours['step_seconds'] == pytest.approx(max((2 * n + ours['batch'] * read) / 0.5e12,
                                                     computed / 0.5e14))
    # layers 0 to 7 (0, 2, 5 and 6 own) and the projections of layer 8 for 20 tokens, the rest for 1
    owner, reader, rest = 768 * 14 * 64, 768 * 12 * 64, 768 * 768 + 2 * 768 * 3840
    weights = 20 * (5 * owner + 4 * reader + 8 * rest) + rest + 3 * (reader + rest) + 50304 * 768
    keys = 20 * (7 * 256 + 4010.5) + 3 * 256 + 4020
    assert ours['prefill_seconds'] == pytest.approx((2 * weights + 4 * 12 * 64 * keys) / 0.5e14)
    seconds = ours['prefill_seconds'] + 100 * ours['step_seconds'] / ours['batch']
    assert ours['requests_per_second'] == pytest.approx(1 / seconds)
    assert ours['gpus'] == math.ceil(1000 * seconds)
    assert ours['cost_per_million_tokens'] == pytest.approx(0.001 * seconds / 100 * 1e6)
    assert (ours['kept'], ours['kept_bytes']) == (10_000, 10_000 * ours['kv_bytes'])
    assert vanilla['kv_bytes'] == 2 * 12 * 64 * 2 * 12 * 4120 and ours['gpus'] < vanilla['gpus']
    assert f"{vanilla['kv_bytes']:,}" in out


def test_a_limit_on_the_time_of_a_token_and_tokens_to_recompute(capsys):
    free, found = (said(capsys, *MINE, f'--tpot={ms}')[0]['ours'] for ms in (0, 5))
    assert found['step_seconds'] <= 0.005 < free['step_seconds']
    assert 1 <= found['batch'] < free['batch'] and found['gpus'] >= free['gpus']
    assert found['sequences'] == free['sequences']
    known, unknown = (said(capsys, *MINE, f'--hit_rate={rate}')[0]['ours'] for rate in (1, 0))
    assert unknown['prefill_seconds'] > 100 * known['prefill_seconds']

    found, out = said(capsys, *MINE, '--memory=260MB')  # which holds no conversation
    assert found['ours']['sequences'] == found['vanilla']['sequences'] == 0
    assert 'gpus' not in found['ours'] and ' - ' in out
    found, out = said(capsys, *MINE, '--tpot=0.7')
    assert 'batch' in found['ours'] and not found['vanilla'].keys() & {'batch', 'gpus'}
    assert 'takes longer than tpot=0.7' in out


@pytest.mark.parametrize('flag, named', [
    ('--context=0', 'context=0'), ('--hit_rate=2', 'hit_rate=2'), ('--flops=nan', "flops='nan'"),
    ('--away=-1', 'away=-1'), ('--tpot=1e308', 'tpot=1e+308'), ('--memory=much', "memory='much'"),
    ('--utilization=0', 'utilization=0'),
    ('--pos_embedding=learned', '4,120 tokens is longer than the block_size=1024')])
def test_wrong_settings(flag, named):
    with pytest.raises(UserError) as caught:
        capacity.main([*MINE, flag])
    assert named in str(caught.value)


@pytest.mark.parametrize('tokens, before', [(20, 0), (20, 7), (1, 30)])
@pytest.mark.parametrize('name', ['nothing', 'nothing shared', *CHANGES])
def test_prefill_flops_with_every_mechanism(name, tokens, before):
    """Matmuls with weights, counted as they run; attention from the shapes that it gets."""
    unshared = dict(kv_share='', share_global_kv=False)
    changes = {'nothing': {}, 'nothing shared': unshared} | CHANGES
    config = GPTConfig(**STACK | changes[name])
    model, plan = GPT(config).eval(), plan_kv(config)
    cache = model.new_cache(1, before + tokens).fill_(before)
    plain, linear, absorbed, attended = cache.attend, 0, 0, 0

    def attend(layer, q, *args):
        nonlocal absorbed, attended
        width, (_, H, n, _) = q.size(3), q.shape
        if plan.slots[layer.slot].latent:  # q @ k_up and y @ v_up
            absorbed += 2 * 2 * H * n * plan.head_dim * width
        ends = range(before + tokens - n + 1, before + tokens + 1)
        attended += 4 * H * width * sum(min(end, layer.window or end) for end in ends)
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
    flops = capacity.prefill_flops(config, plan, tokens, before)
    assert flops == linear + absorbed + attended
    assert (absorbed > 0) == bool(config.kv_latent)


@pytest.mark.filterwarnings('ignore:layer_pattern')
def test_a_step_with_latents_computes_and_reads_what_they_take(capsys):
    """By hand: one global layer with a latent of 128, two reading it."""
    shape = ['--n_layer=2', '--n_head=4', '--n_embd=128', '--head_dim=32', '--kv_latent=128',
             '--share_global_kv=True', '--pos_embedding=rope', '--rope_fraction_global=0',
             '--layer_pattern=G', '--context=1000', '--message_tokens=10', '--new_tokens=20',
             '--utilization=1', '--flops=1e9', '--bandwidth=1TB', '--kv_dtype=int4']
    ours = said(capsys, *shape)[0]['ours']
    n, attention = ours['parameters'], 2 * 4 * 4 * 128 * 1020
    assert ours['kv_bytes'] == (128 // 2 + 2) * 1030
    assert ours['step_seconds'] == pytest.approx(ours['batch'] * (2 * n + attention) / 1e9)
