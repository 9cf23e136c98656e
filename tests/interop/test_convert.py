"""Conversion to a smaller KV cache: pooled heads, shared layers, and refused changes."""
import dataclasses

import pytest
import torch

from common.errors import UserError
from interop import convert
from training.checkpoint.convert import convert_weights
from model import GPT, GPTConfig
from tests.helpers.models import full_logits

MHA = GPTConfig(block_size=24, vocab_size=13, n_layer=4, n_head=4, n_embd=32, bias=True,
                pos_embedding='rope', qk_norm=True)
IDX = torch.randint(13, (2, 24), generator=torch.Generator().manual_seed(0))


def model_of(config, seed=0):
    torch.manual_seed(seed)
    model = GPT(config).double().eval()
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * 0.1)
    return model


def converted(model, **changes):
    new = dataclasses.replace(model.config, **changes)
    out = GPT(new).double().eval()
    out.load_state_dict(convert_weights(model.state_dict(), model.config, new))
    return out


def test_layers_that_share_read_what_both_had():
    """If the second layer had the same input and the same K/V as the first, nothing changes."""
    model = model_of(MHA)
    first = model.transformer.h[0]
    for name in ('attn.c_proj', 'mlp.c_proj'):  # layer 0 adds nothing to the residual stream
        for p in first.get_submodule(name).parameters():
            p.data.zero_()
    second = model.transformer.h[1]
    second.ln_1.load_state_dict(first.ln_1.state_dict())
    second.attn.k_norm.load_state_dict(first.attn.k_norm.state_dict())
    for own, other in zip(second.attn.c_attn.parameters(), first.attn.c_attn.parameters()):
        own.data[32:] = other.data[32:]
    shared = converted(model, layer_pattern='LLLG', kv_share='AABC', window_size=24)
    assert [layer.owns for layer in shared.plan.layers] == [True, False, True, True]
    assert 'transformer.h.1.attn.k_norm.weight' not in shared.state_dict()
    assert (full_logits(shared, IDX) - full_logits(model, IDX)).abs().max() < 1e-10


@pytest.mark.parametrize('bias', [False, True])
def test_the_heads_of_a_shared_slot_are_means_over_its_layers(bias):
    model = model_of(dataclasses.replace(MHA, bias=bias))
    shared = converted(model, layer_pattern='LLLG', kv_share='AAAB', window_size=24, n_kv_head=2)
    assert [layer.owns for layer in shared.plan.layers] == [True, False, False, True]
    for name in ('weight', 'bias') if bias else ('weight',):
        own = [getattr(block.attn.c_attn, name) for block in model.transformer.h]
        mean = sum(p[32:].unflatten(0, (2, 2, 2, 8)).mean(2).flatten(0, 2) for p in own[:3]) / 3
        for i, block in enumerate(shared.transformer.h[:3]):
            expected = torch.cat([own[i][:32], mean]) if i == 0 else own[i][:32]
            torch.testing.assert_close(getattr(block.attn.c_attn, name), expected)


TIED = {'kv_tied': 'global', 'layer_pattern': 'LG', 'window_size': 5}
LATENT = {'kv_latent': 16, 'rope_fraction_global': 0.0, 'layer_pattern': 'LG', 'window_size': 5}


@pytest.mark.parametrize('old', [{}, TIED, LATENT, {'key_offset': True}], ids=str)
def test_heads_become_their_mean(old):
    """c_attn has q | k | v; q | k where K = V; and q | latent, which is not pooled."""
    model = model_of(dataclasses.replace(MHA, **old))
    new = converted(model, n_kv_head=2)
    for was, now, layer in zip(model.transformer.h, new.transformer.h, model.plan.layers):
        slot, was, now = model.plan.slots[layer.slot], was.attn.c_attn, now.attn.c_attn
        for p, x in zip(was.parameters(), now.parameters()):
            own = p[32:]
            if not slot.latent:
                own = own.unflatten(0, (2 - slot.tied, 2, 2, 8)).mean(2).flatten(0, 2)
            torch.testing.assert_close(x, torch.cat([p[:32], own]))
    assert full_logits(new, IDX).isfinite().all()
    shared = converted(model, share_global_kv=True)
    assert shared.transformer.h[3].attn.c_attn.weight.shape == (32, 32)
    assert 'transformer.h.3.attn.k_norm.weight' not in shared.state_dict()


def test_heads_of_some_layers_become_their_mean():
    model = model_of(dataclasses.replace(MHA, layer_pattern='LLG', window_size=4))
    new = converted(model, kv_head_pattern='1,2,0', window_pattern='3,5,0')
    assert [slot.n_kv_head for slot in new.plan.slots][:3] == [1, 2, 4]
    for was, now, n in zip(model.transformer.h, new.transformer.h, (1, 2, 4)):
        p, x = was.attn.c_attn.weight, now.attn.c_attn.weight
        own = p[32:].unflatten(0, (2, n, 4 // n, 8)).mean(2).flatten(0, 2)
        torch.testing.assert_close(x, torch.cat([p[:32], own]))
    fewer = converted(model_of(dataclasses.replace(new.config, layer_pattern='GGG',
                                                   window_pattern='', kv_head_pattern='4,1,1')),
                      kv_share='AAB', kv_head_pattern='4,4,1')  # layer 1 reads more than it had
    assert [(slot.owner, slot.n_kv_head) for slot in fewer.plan.slots[:2]] == [(0, 4), (2, 1)]


@pytest.mark.parametrize('old, new, named', [
    ({'layer_pattern': 'LG', 'window_size': 4, 'kv_head_pattern': '2,4'},
     {'kv_head_pattern': '4,4'}, 'n_kv_head=4: the 2 K/V heads'),
    ({'layer_pattern': 'LG', 'window_size': 4, 'kv_head_pattern': '2,4'}, {'n_kv_head': 1},
     "n_kv_head=1: the weights have kv_head_pattern='2,4'"),
    ({}, {'attn_sink': True}, 'attn_sink=True'), ({}, {'kv_tied': 'all'}, "kv_tied='all'"),
    ({}, {'key_offset': True}, 'key_offset=True'),
    (LATENT, {'kv_latent': 8}, 'kv_latent=8, but the weights have kv_latent=16'),
    (TIED, {'layer_pattern': 'LLLG'}, 'layer 1 would be local, but was trained global'),
    (LATENT, {'layer_pattern': 'LLLG'}, 'layer 1 would be local'),
    ({'key_offset': True}, TIED | {'kv_tied': ''}, 'layer 0 would be local'),
    ({}, {'n_kv_head': 1, 'mlp_hidden': 64}, 'mlp_hidden=64'),
    ({}, {'qk_norm': False}, 'qk_norm=False'),
    ({'n_kv_head': 2}, {'n_kv_head': 4}, 'n_kv_head=4: the 2 K/V heads'),
    ({'layer_pattern': 'LLLG', 'kv_share': 'AABC', 'window_size': 5}, {'kv_share': ''},
     'layer 1 .* those of layer 0')])
def test_what_cannot_be_is_named(old, new, named):
    model = model_of(dataclasses.replace(MHA, **old))
    with pytest.raises(UserError, match=named):
        converted(model, **new)


@pytest.mark.parametrize('argv, named', [
    (['out'], 'give the folder'), (['out', '--n_kv_head=1'], 'give'),
    (['no/such', 'new'], 'nothing to change'), (['no/such', 'new', '--n_kv_head=1'], 'no/such')])
def test_wrong_commands_are_named(argv, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=named):
        convert.main(argv)
    assert not (tmp_path / 'new').exists()
