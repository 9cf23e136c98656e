"""The model on transformers' caches has the logits of ours: whole, in pieces, padded on the left, generated."""
import pytest
import torch
from transformers.cache_utils import StaticCache

from config.gpt_config import GPTConfig, model_args
from interop.modeling import NanoKVConfig, NanoKVForCausalLM
from tests.helpers.models import FULL_STACK, VOCAB, full_logits, random_model, tokens

SHAPE = dict(n_layer=7, n_head=4, n_embd=24, block_size=64, vocab_size=VOCAB)
SHAPES = {
    'vanilla': SHAPE, 'no bias, tanh': dict(SHAPE, bias=False, gelu='tanh', mlp_hidden=30),
    'gqa': dict(SHAPE, n_kv_head=2, pos_embedding='rope', layer_pattern='LLG', window_size=5, rope_theta_global=1e5),
    'full': FULL_STACK, 'first': dict(FULL_STACK, layer_pattern='GLLLLL', kv_share='ABBCCC', bias=False),
    'local': dict(FULL_STACK, layer_pattern='L', kv_share='', share_global_kv=False),
}
NEAR = dict(rtol=0, atol=1e-4)


@pytest.fixture(params=SHAPES)
def pair(request):
    config = GPTConfig(**SHAPES[request.param])
    ours = random_model(config, torch.float32)
    theirs = NanoKVForCausalLM(NanoKVConfig(nanokv=model_args(config))).eval()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.filterwarnings('ignore:layer_pattern')
@pytest.mark.parametrize('attention', ['sdpa', 'eager'])
@torch.no_grad()
def test_whole_texts(pair, attention):
    ours, theirs = pair
    theirs.set_attn_implementation(attention)
    idx = tokens(2, 40)
    for use_cache in (False, True):
        torch.testing.assert_close(theirs(idx, use_cache=use_cache).logits, full_logits(ours, idx), **NEAR)
    torch.testing.assert_close(theirs(idx, logits_to_keep=1).logits, ours(idx)[0], **NEAR)


@torch.no_grad()
def test_in_pieces_by_a_cache_that_is_small(pair):
    ours, theirs = pair
    idx, cache, out = tokens(2, 40), None, []
    for piece in idx.split([3, 1, 1, 17, 1, 9, 8], dim=1):
        found = theirs(piece, past_key_values=cache, use_cache=True)
        cache = found.past_key_values
        out.append(found.logits)
    torch.testing.assert_close(torch.cat(out, dim=1), full_logits(ours, idx), **NEAR)
    held = [getattr(layer, 'keys', None) for layer in cache.layers]
    for layer, keys in zip(ours.plan.layers, held):
        assert (keys is not None and keys.numel() > 0) == layer.owns
        if layer.owns:  # a window's own query is not kept
            assert keys.shape == (2, ours.plan.n_kv_head, layer.window - 1 if layer.window else 40, ours.plan.head_dim)


def greedy(model, idx, n):
    for _ in range(n):
        idx = torch.cat([idx, model(idx)[0][:, -1].argmax(-1, keepdim=True)], dim=1)
    return idx


@pytest.mark.filterwarnings('ignore:layer_pattern')
@torch.no_grad()
def test_generate(pair):
    """Past two windows; padded on the left; and with beams, which reorder the cache."""
    ours, theirs = pair
    prompts, n = tokens(3, 9, seed=1), 25
    settings = dict(max_new_tokens=n, do_sample=False, pad_token_id=0)
    expected = greedy(ours, prompts, n)
    assert torch.equal(theirs.generate(prompts, attention_mask=torch.ones_like(prompts), **settings), expected)
    mask = torch.tensor([[0] * 4 + [1] * 9] * 3)
    padded = theirs.generate(torch.cat([torch.zeros(3, 4, dtype=torch.long), prompts], dim=1), attention_mask=mask, **settings)
    assert torch.equal(padded[:, 4:], expected)
    mixed = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompts[:1, :5]], dim=1), prompts[1:2]
    mask = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    found = theirs.generate(torch.cat(mixed), attention_mask=mask, **settings)
    assert torch.equal(found[0, 4:], greedy(ours, prompts[:1, :5], n)[0]) and torch.equal(found[1], expected[1])
    settings |= dict(num_beams=3, attention_mask=torch.ones_like(prompts[:1]))
    beams = theirs.generate(prompts[:1], **settings)
    assert torch.equal(beams, theirs.generate(prompts[:1], use_cache=False, **settings))


@torch.no_grad()
def test_a_static_cache_serves_too(pair):
    ours, theirs = pair
    idx = tokens(1, 12)
    cache = StaticCache(config=theirs.config, max_cache_len=20)
    first = theirs(idx[:, :9], past_key_values=cache, use_cache=True).logits
    rest = [theirs(idx[:, i:i + 1], past_key_values=cache, use_cache=True).logits for i in range(9, 12)]
    torch.testing.assert_close(torch.cat([first, *rest], dim=1), full_logits(ours, idx), **NEAR)


def test_it_can_be_trained(pair):
    """Loss and gradients are those of ours: labels are shifted there."""
    ours, theirs = pair
    idx = tokens(2, 20)
    loss = theirs.train()(idx, labels=idx).loss
    expected = ours.train()(idx[:, :-1], idx[:, 1:])[1]
    torch.testing.assert_close(loss, expected, **NEAR)
    loss.backward()
    expected.backward()
    for p, q in zip(theirs.parameters(), ours.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_more_positions_than_were_learned_are_refused():
    theirs = NanoKVForCausalLM(NanoKVConfig(nanokv=SHAPE)).eval()
    with pytest.raises(ValueError, match='65 tokens is longer than the 64 positions'):
        theirs(torch.zeros(1, 65, dtype=torch.long))


@pytest.mark.parametrize('keys, named', [
    (dict(nanokv=dict(window=3)), "'window'"), (dict(nanokv=dict(n_layer=0)), 'n_layer=0'),
    (dict(nanokv=SHAPE, num_hidden_layers=8), 'num_hidden_layers=8.*it is 7'),
    (dict(nanokv=FULL_STACK, sliding_window=6), 'sliding_window=6.*it is 5')])
def test_a_config_that_makes_no_sense(keys, named):
    with pytest.raises(ValueError, match=named):
        NanoKVConfig(**keys)


def test_a_config_survives_its_file(tmp_path):
    config = NanoKVConfig(nanokv=FULL_STACK)
    config.save_pretrained(tmp_path)
    again = NanoKVConfig.from_pretrained(tmp_path)
    assert again.gpt_config() == config.gpt_config() == GPTConfig(**FULL_STACK)
    assert again.layer_types == ['sliding_attention'] * 5 + ['full_attention', 'sliding_attention']
    assert again.kv_owners == [0, 0, 2, 2, 2, 5, 6] and again.kv_sharing_modes.count('reuse') == 3
