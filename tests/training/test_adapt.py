"""Checkpoints resumed with different settings: which may change, and which tensors change."""
import copy

import pytest
import torch

from common.errors import UserError
from common.gpt_config import GPTConfig, model_args
from model import GPT
from training.checkpoint.adapt import adapt, adapted_config, differences
from training.step.optim import load_optimizer

WPE = 'transformer.wpe.weight'
SHAPE = dict(block_size=16, vocab_size=11, n_layer=2, n_head=2, n_embd=8)


def adapted(old, wanted):
    return adapted_config(old, wanted, lambda name: f'{name}={wanted[name]!r}')


def checkpoint(config):
    """A model's weights and its optimizer's state after two steps, as train.py saves them."""
    torch.manual_seed(0)
    model = GPT(config)
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95), 'cpu')
    for _ in range(2):
        idx = torch.randint(11, (3, 16))
        model(idx, idx)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return {'model': model.state_dict(), 'optimizer': optimizer.state_dict(),
            'model_args': model_args(config)}


def states(saved):
    """{name of a parameter: AdamW's state}, loaded from the checkpoint."""
    model = GPT(GPTConfig(**saved['model_args']))
    model.load_state_dict(saved['model'])
    optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95), 'cpu')
    load_optimizer(optimizer, saved['optimizer'])
    return {name: optimizer.state[p] for name, p in model.named_parameters()}


@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize(
    'wanted', [dict(block_size=5), dict(pos_embedding='rope'), dict(gelu='tanh')], ids=str)
def test_every_parameter_keeps_its_weights_and_moments(bias, wanted):
    old = GPTConfig(**SHAPE, bias=bias)
    saved = checkpoint(old)
    before, after = copy.deepcopy(saved), saved
    new = adapted(old, wanted)
    adapt(after, old, new, 'here')
    was, now = states(before), states(after)
    assert was.keys() - now.keys() == ({WPE} if 'pos_embedding' in wanted else set())
    for name, state in now.items():
        n = 5 if name == WPE and 'block_size' in wanted else None
        assert torch.equal(after['model'][name], before['model'][name][:n]), name
        assert torch.equal(state['step'], was[name]['step'])
        for part in ('exp_avg', 'exp_avg_sq'):
            assert torch.equal(state[part], was[name][part][:n]), name
    assert after['model_args'] == model_args(new)


def test_what_means_the_same_is_no_change_and_local_layers_of_one_form_may_become_global():
    old = GPTConfig(**SHAPE)
    wanted = dict(n_kv_head=2, head_dim=4, mlp_hidden=32)
    assert adapted(old, wanted) == old
    assert differences(old, adapted(old, wanted)) == []
    assert adapted(GPTConfig(**SHAPE | FORMS), TO_LOCAL[0]).layer_pattern == 'LLLG'


def test_weights_without_an_optimizer_follow_too_and_a_state_that_is_none_is_named():
    old = GPTConfig(**SHAPE)
    new, saved = adapted(old, dict(block_size=3)), {'model': GPT(old).state_dict()}
    adapt(saved, old, new, 'here')
    assert saved['model'][WPE].shape == (3, 8)
    with pytest.raises(UserError, match='there.*optimizer'):
        adapt(checkpoint(old) | {'optimizer': {'state': 5}}, old, new, 'there')


ROPE = dict(n_layer=6, window_size=4, pos_embedding='rope')
FORMS = dict(ROPE, n_layer=4, head_dim=8, layer_pattern='LLGG')
TO_LOCAL = dict(layer_pattern='LLLG'), 'layer 2 would be local, but was trained global'


@pytest.mark.filterwarnings('ignore:layer_pattern')
@pytest.mark.parametrize('old, wanted, named', [
    ({}, dict(n_layer=7, mlp_hidden=31, block_size=17), 'mlp_hidden=31.*n_layer=7.*block_size=17'),
    *(({}, {name: value}, f'{name}={value!r}') for name, value in dict(
        n_kv_head=1, head_dim=2, mlp_hidden=31, qk_norm=True, kv_share='A', block_size=17,
        rope_theta_global=3.0, share_global_kv=True, attn_sink=True, key_offset=True,
        kv_tied='global', kv_latent=4, rope_fraction_global=0.5).items()),
    ({}, dict(layer_pattern='L'), 'window_size=0'),
    (dict(ROPE, layer_pattern='LG', window_pattern='3,0'), dict(window_size=5),
     "window_size=5: the weights have window_pattern='3,0' in its place; give window_pattern"),
    (ROPE, dict(pos_embedding='learned'), "pos_embedding='learned'"),
    (dict(ROPE, layer_pattern='LLLLLG', kv_share='AABBBC', share_global_kv=True),
     dict(layer_pattern='GGGGGL'), "'GGGGGL'.*layer 2"),
    # layers 0 and 1 are owners in both, but layer 3 would read K/V of layer 0
    (dict(ROPE, layer_pattern='LGLG', share_global_kv=True), dict(layer_pattern='GLLG'),
     "'GLLG'.*layer 3.*layer 1"),
    # a global layer would become a local one, which stores another form
    *((FORMS | changes, *TO_LOCAL) for changes in (
        dict(key_offset=True), dict(kv_tied='global'),
        dict(kv_latent=8, rope_fraction_global=0.0)))])
def test_what_weights_cannot_follow_is_named(old, wanted, named):
    with pytest.raises(UserError, match=named) as caught:
        adapted(GPTConfig(**SHAPE | old), wanted)
    can_be_pooled = wanted.keys() & {'n_kv_head', 'kv_share', 'share_global_kv'}
    assert ('python -m interop.convert' in str(caught.value)) == bool(can_be_pooled)
