"""Configs of each mechanism that changes what a cache stores or how layers attend. (Random
combinations of them: `tests.helpers.models.configs`.)"""
from tests.helpers.models import FULL_STACK, VOCAB

BASE = dict(n_layer=7, n_head=4, n_embd=24, n_kv_head=2, head_dim=8, block_size=64,
            vocab_size=VOCAB, layer_pattern='LLG', kv_share='AAB', window_size=5,
            pos_embedding='rope', rope_theta=100.0, qk_norm=True)
GLOBAL = dict(BASE, n_layer=3, layer_pattern='G', kv_share='', window_size=0)
LEARNED = dict(pos_embedding='learned')
SUFFIX = dict(layer_pattern='LLLGGGG', kv_share='ABCDDDD')  # a decoder's later half reads one slot
MECHANISMS = {
    'sinks': dict(BASE, attn_sink=True),
    'gate': dict(BASE, attn_gate=True),
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
    'a shared suffix': dict(BASE, **SUFFIX),
    'layers that differ': dict(BASE, window_pattern='5,5,0', kv_head_pattern='1,1,4'),
    'windows that differ': dict(BASE, kv_share='ABC', window_pattern='3,9,0'),
    'together': dict(BASE, **SUFFIX, attn_sink=True, rope_fraction_global=0.5, key_offset=True,
                     gelu='relu2'),
}

# as changes of a stack with head_dim=8 and two or more query heads, such as STACK
CHANGES = {
    'sink': dict(attn_sink=True),
    'partial RoPE': dict(rope_fraction_global=0.5),
    'NoPE': dict(rope_fraction_global=0.0),
    'key offset': dict(key_offset=True),
    'global K = V': dict(kv_tied='global'),
    'K = V': dict(kv_tied='all'),
    'latents': dict(kv_latent=16, rope_fraction_global=0.0),
    'latents with learned positions': dict(
        kv_latent=24, pos_embedding='learned', share_global_kv=False, qk_norm=False),
    'layers that differ': dict(layer_pattern='LLG', kv_share='', window_pattern='4,9,0',
                               kv_head_pattern='1,2,0'),
    'ReLU squared': dict(gelu='relu2'),
    'many': dict(kv_latent=16, rope_fraction_global=0.0, attn_sink=True,
                 kv_quant_train='int8', n_kv_head=2, layer_pattern='LG', kv_share='',
                 share_global_kv=False, bias=True)}
STACK = dict(FULL_STACK, head_dim=8)
