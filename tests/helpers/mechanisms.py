"""Models with each of the mechanisms that change what a cache stores or how layers attend, and
random combinations of them."""
from dataclasses import replace

from hypothesis import strategies as st

from tests.helpers.models import VOCAB, configs

BASE = dict(n_layer=7, n_head=4, n_embd=24, n_kv_head=2, head_dim=8, block_size=64,
            vocab_size=VOCAB, layer_pattern='LLG', kv_share='AAB', window_size=5,
            pos_embedding='rope', rope_theta=100.0, qk_norm=True)
GLOBAL = dict(BASE, n_layer=3, layer_pattern='G', kv_share='', window_size=0)
LEARNED = dict(pos_embedding='learned')
SUFFIX = dict(layer_pattern='LLLGGGG', kv_share='ABCDDDD')  # a decoder's later half reads one slot
MECHANISMS = {
    'sinks': dict(BASE, attn_sink=True),
    'no global rope': dict(BASE, rope_fraction_global=0.0),
    'some global rope': dict(BASE, rope_fraction_global=0.5),
    'offset keys': dict(BASE, key_offset=True),
    'offset keys of one slot': dict(BASE, key_offset=True, share_global_kv=True, n_kv_head=1),
    'offset keys, all global': dict(GLOBAL, key_offset=True, **LEARNED),
    'tied': dict(BASE, kv_tied='global'),
    'all tied': dict(BASE, kv_tied='all', attn_sink=True),
    'tied without rope': dict(GLOBAL, kv_tied='all', rope_fraction_global=0.0),
    'latents': dict(BASE, kv_latent=16, rope_fraction_global=0.0),
    'latents of one slot': dict(BASE, kv_latent=24, share_global_kv=True, attn_sink=True,
                                **LEARNED),
    'ReLU squared': dict(BASE, gelu='relu2'),
    'clamped': dict(BASE, act_clamp=0.5),
    'a shared suffix': dict(BASE, **SUFFIX),
    'together': dict(BASE, **SUFFIX, attn_sink=True, rope_fraction_global=0.5, key_offset=True,
                     gelu='relu2', act_clamp=1.0),
}


@st.composite
def mechanisms(draw, **fixed):
    """Any plan with any mechanisms that go together."""
    config = draw(configs(**fixed) | configs(**fixed, **SUFFIX, n_layer=9, window_size=3))
    D, rope = config.resolved_head_dim, config.pos_embedding == 'rope'
    stored = [{}, dict(kv_tied='all')]
    if 'G' in config.layer_pattern:
        stored += [dict(kv_tied='global'), dict(kv_latent=draw(st.sampled_from([D, 3 * D])))]
        stored += [dict(key_offset=True)] * (2 * (D % 4 == 0))
    stored = draw(st.sampled_from(stored))
    if rope:
        fractions = [0.0] if 'kv_latent' in stored else [1.0, 0.5, 0.0]
        stored = stored | dict(rope_fraction_global=draw(st.sampled_from(fractions)))
    return replace(config, attn_sink=draw(st.booleans()), act_clamp=draw(st.sampled_from([0, 0.7])),
                   gelu=draw(st.sampled_from(['exact', 'relu2'])), **stored)
