"""The exported model equals GPT: full, cached, left-padded, in generation and in training."""
import copy
import dataclasses
from itertools import pairwise

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common.gpt_config import GPTConfig, model_args
from interop import import_hf
from interop.export import hf_model
from interop.huggingface import derived_keys
from interop.modeling_nanokv import NanoKVForCausalLM
from interop.nanokv_vllm.config import NanoKVConfig
from kv.plan import plan_kv
from tests.helpers.models import FULL_STACK, VOCAB, full_logits, random_model, tokens

SHAPE = dict(n_layer=7, n_head=4, n_embd=24, block_size=64, vocab_size=VOCAB)
SHAPES = {
    'vanilla': SHAPE,
    'gqa': dict(SHAPE, n_kv_head=2, pos_embedding='rope', layer_pattern='LLG', window_size=5,
                rope_theta_global=1e5, bias=False, gelu='tanh', mlp_hidden=30),
    'full': FULL_STACK,
    'first': dict(FULL_STACK, layer_pattern='GLLLLL', kv_share='ABBCCC', bias=False),
    'local': dict(FULL_STACK, layer_pattern='L', kv_share='', share_global_kv=False, gelu='relu2'),
    'sinks': dict(FULL_STACK, attn_sink=True, rope_fraction_global=0.5),
    'nope': dict(FULL_STACK, rope_fraction_global=0.0),
    'offset': dict(FULL_STACK, head_dim=8, key_offset=True, n_kv_head=2),
    'gates': dict(FULL_STACK, attn_gate=True),
    'tied': dict(FULL_STACK, kv_tied='all', n_kv_head=2, rope_theta_global=1e4),
    'tied global': dict(SHAPE, kv_tied='global', layer_pattern='LG', window_size=5),
    'latents': dict(FULL_STACK, kv_latent=12, rope_fraction_global=0.0, attn_sink=True),
    'latents, learned': dict(SHAPE, kv_latent=18, n_kv_head=2, qk_norm=True),
}
NEAR = dict(rtol=0, atol=1e-4)


def exported_config(config: GPTConfig) -> NanoKVConfig:
    return NanoKVConfig(nanokv=model_args(config), **derived_keys(config))


def pair_of(name):
    config = GPTConfig(**SHAPES[name])
    ours = random_model(config, torch.float32)
    theirs = NanoKVForCausalLM(exported_config(config)).eval()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.fixture(params=SHAPES)
def pair(request):
    return pair_of(request.param)


@pytest.fixture(params=['gqa', 'sinks', 'offset', 'tied', 'latents, learned'])
def some_pair(request):
    """For behaviour that depends on the kind of the cache, not on each setting."""
    return pair_of(request.param)


@pytest.mark.filterwarnings('ignore:layer_pattern')
@pytest.mark.parametrize('attention', ['sdpa', 'eager'])
@torch.no_grad()
def test_whole_and_packed_texts(pair, attention):
    ours, theirs = pair
    theirs.set_attn_implementation(attention)
    idx = tokens(2, 40)
    for use_cache in (False, True):
        logits = theirs(idx, use_cache=use_cache).logits
        torch.testing.assert_close(logits, full_logits(ours, idx), **NEAR)
    torch.testing.assert_close(theirs(idx, logits_to_keep=1).logits, ours(idx)[0], **NEAR)
    idx, position_ids = idx[:1, :20], torch.cat([torch.arange(7), torch.arange(13)])[None]
    expected = torch.cat([full_logits(ours, x) for x in idx.split([7, 13], dim=1)], dim=1)
    found = theirs(idx, position_ids=position_ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, **NEAR)


def in_pieces(theirs, idx, cache, cuts):
    """Logits of idx, which goes through the cache piece by piece."""
    return torch.cat([theirs(piece, past_key_values=cache, use_cache=True).logits
                      for piece in idx.split(cuts, dim=1)], dim=1)


def held(cache):
    return sum(x.numel() * x.element_size() for layer in cache.layers
               for x in (layer.keys, layer.values) if x is not None)


@torch.no_grad()
def test_in_pieces_by_caches_of_the_plans_bytes(some_pair):
    """A dynamic cache keeps one position less than the window. The state of offset keys is derived
    from all keys there."""
    ours, theirs = some_pair
    idx, c = tokens(2, 40), ours.config
    narrower = plan_kv(dataclasses.replace(c, window_size=max(0, c.window_size - 1)))
    state = 2 * sum(slot.state_nbytes('float32') for slot in ours.plan.slots)
    for cache, plan, room in ((DynamicCache(config=theirs.config), narrower, 40),
                              (StaticCache(config=theirs.config, max_cache_len=50), ours.plan, 50)):
        found = in_pieces(theirs, idx, cache, [3, 1, 1, 17, 1, 9, 8])
        torch.testing.assert_close(found, full_logits(ours, idx), **NEAR)
        assert held(cache) == plan.nbytes(2, room, 'float32') - state


def greedy(model, idx, n):
    for _ in range(n):
        idx = torch.cat([idx, model(idx)[0][:, -1].argmax(-1, keepdim=True)], dim=1)
    return idx


@pytest.mark.filterwarnings('ignore:layer_pattern')
@pytest.mark.parametrize('kept_in', ['dynamic', 'static'])
@torch.no_grad()
def test_generate(some_pair, kept_in):
    """Beyond two windows; padded on the left; and with beams, which reorder the cache."""
    ours, theirs = some_pair
    prompts, n = tokens(3, 9, seed=1), 25
    settings = dict(max_new_tokens=n, do_sample=False, pad_token_id=0, disable_compile=True,
                    cache_implementation=kept_in)
    expected = greedy(ours, prompts, n)
    found = theirs.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
    assert torch.equal(found, expected)
    mixed = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompts[:1, :5]], dim=1), prompts[1:2]
    mask = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    found = theirs.generate(torch.cat(mixed), attention_mask=mask, **settings)
    assert torch.equal(found[0, 4:], greedy(ours, prompts[:1, :5], n)[0])
    assert torch.equal(found[1], expected[1])
    if kept_in == 'dynamic':
        settings |= dict(num_beams=3, attention_mask=torch.ones_like(prompts[:1]))
        beams = theirs.generate(prompts[:1], **settings)
        del settings['cache_implementation']
        assert torch.equal(beams, theirs.generate(prompts[:1], use_cache=False, **settings))


@pytest.mark.parametrize('name', ['full', 'offset', 'tied', 'latents'])
@torch.no_grad()
def test_keys_and_values_are_rounded_as_in_training(name):
    """In float64, in which both round in the same direction."""
    config = GPTConfig(**SHAPES[name] | dict(kv_quant_train='int8', attn_sink=False))
    ours = random_model(config)
    theirs = hf_model(ours, torch.float64)
    idx = tokens(2, 40)
    found = in_pieces(theirs, idx, DynamicCache(config=theirs.config), [17, 1, 22])
    expected = full_logits(ours, idx)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    plain = random_model(dataclasses.replace(config, kv_quant_train=''))
    assert (full_logits(plain, idx) - expected).abs().max() > 1e-3


def test_a_file_comes_back_bit_for_bit(pair, tmp_path):
    ours, theirs = pair
    hf_model(ours).save_pretrained(tmp_path)
    again = import_hf.checkpoint_of(tmp_path)
    assert again['model_args'] == model_args(ours.config)
    assert again['model'].keys() == ours.state_dict().keys()
    assert all(torch.equal(x, again['model'][name]) for name, x in ours.state_dict().items())
    theirs.resize_token_embeddings(VOCAB + 3)
    theirs.save_pretrained(tmp_path)
    again = NanoKVForCausalLM.from_pretrained(tmp_path).eval()
    assert again.transformer.wte.weight.shape[0] == VOCAB + 3 == again.config.vocab_size
    assert torch.equal(again(tokens(1, 9)).logits, theirs(tokens(1, 9)).logits)


@pytest.mark.parametrize('name, attention, n_tokens, named', [
    ('sinks', 'flex_attention', 4, "'flex_attention' does not have attn_sink=True: use 'sdpa'"),
    ('offset', 'flash_attention_2', 4, "'flash_attention_2' does not have key_offset=True: use"),
    ('vanilla', 'sdpa', 65, '65 tokens is longer than the 64 positions')])
def test_what_the_model_cannot_do_is_refused(name, attention, n_tokens, named):
    theirs = NanoKVForCausalLM(exported_config(GPTConfig(**SHAPES[name])))
    theirs.config._attn_implementation = attention  # flash attention is not installed
    with pytest.raises(ValueError, match=named):
        theirs(torch.zeros(1, n_tokens, dtype=torch.long))


@pytest.mark.parametrize('name', ['full', 'tied', 'latents, learned'])
@torch.no_grad()
def test_arguments_of_attention_functions(name):
    """Kernels without masks need the causal flag, the window, and the positions of packed texts."""
    (ours, theirs), passed = pair_of(name), []

    def spy(module, q, k, v, mask, **settings):
        passed.append((module.is_causal, settings['sliding_window'], settings['scaling'],
                       settings['position_ids'].tolist()))
        return sdpa_attention_forward(module, q, k, v, mask, **settings)
    AttentionInterface.register('sdpa_spied', spy)
    theirs.set_attn_implementation('sdpa_spied')
    theirs(tokens(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False)
    scale, ids = ours.plan.head_dim ** -0.5, [[0, 1, 2, 0, 1, 2]]
    assert passed == [(True, layer.window or None, scale, ids) for layer in ours.plan.layers]


@torch.no_grad()
def test_positions_that_are_given(pair):
    """After cached tokens; one row for all; and after padding, which has no learned positions."""
    ours, theirs = pair
    idx = tokens(2, 40)
    first = theirs(idx[:, :30], use_cache=True)
    for ids in (torch.arange(30, 40), torch.arange(30, 40)[None]):
        cache = copy.deepcopy(first.past_key_values)
        found = theirs(idx[:, 30:], position_ids=ids, past_key_values=cache).logits
        torch.testing.assert_close(found, full_logits(ours, idx)[:, 30:], **NEAR)
    assert theirs(idx[:, :4], position_ids=torch.arange(60, 64)).logits.isfinite().all()
    padded = torch.cat([idx[:, :30], idx], dim=1)
    mask = torch.cat([torch.zeros(2, 30), torch.ones(2, 40)], dim=1).long()
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    for cuts in ([0, 70], [0, 29, 30, 31, 70]):  # some pieces are only padding
        cache = DynamicCache(config=theirs.config)
        out = [theirs(padded[:, a:b], attention_mask=mask[:, :b], past_key_values=cache,
                      position_ids=position_ids[:, a:b]).logits for a, b in pairwise(cuts)]
        found = torch.cat(out, dim=1)[:, 30:]
        torch.testing.assert_close(found, full_logits(ours, idx), **NEAR)


def test_it_can_be_trained(pair):
    """Loss and gradients equal our model's; the exported model shifts the labels itself. In
    float64 (transformers computes the loss in float32)."""
    ours, theirs = (model.double() for model in pair)
    idx = tokens(2, 20)
    loss = theirs.train()(idx, labels=idx).loss
    expected = ours.train()(idx[:, :-1], idx[:, 1:])[1]
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6, check_dtype=False)
    loss.backward()
    expected.backward()
    for p, q in zip(theirs.parameters(), ours.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('reentrant', [True, False])
def test_checkpointing_does_not_change_gradients(some_pair, reentrant):
    """Reentrant checkpointing sees only tensors that are arguments or outputs of a block itself."""
    theirs, idx = some_pair[1].train(), tokens(2, 20)
    theirs(idx, labels=idx).loss.backward()
    expected = [p.grad for p in theirs.parameters()]
    theirs.zero_grad()
    theirs.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    out = theirs(idx, labels=idx, use_cache=True)
    out.loss.backward()
    found = [p.grad for p in theirs.parameters()]
    assert out.past_key_values is None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    cache = theirs.eval()(idx, use_cache=True).past_key_values
    with pytest.raises(ValueError, match='past_key_values .* checkpoint'):
        theirs.train()(idx, past_key_values=cache)
