"""A small config of every mechanism of GPTConfig that shrinks or shapes the cache."""
from hypothesis import strategies as st

from config.gpt_config import GPTConfig
from tests.helpers.models import FULL_STACK

# changes of the full stack with head_dim=8 (two query heads or more)
MECHANISMS = {
    'sink': dict(attn_sink=True),
    'partial RoPE': dict(rope_fraction_global=0.5),
    'NoPE': dict(rope_fraction_global=0.0),
    'key offset': dict(key_offset=True),
    'global K = V': dict(kv_tied='global'),
    'K = V': dict(kv_tied='all'),
    'latents': dict(kv_latent=16, rope_fraction_global=0.0),
    'latents with learned positions': dict(
        kv_latent=24, pos_embedding='learned', share_global_kv=False, qk_norm=False),
    'ReLU squared, clamp': dict(gelu='relu2', act_clamp=0.5),
    'many': dict(kv_latent=16, rope_fraction_global=0.0, attn_sink=True, act_clamp=2.0,
                 kv_quant_train='int8', n_kv_head=2, layer_pattern='LG', kv_share='',
                 share_global_kv=False, bias=True)}
STACK = dict(FULL_STACK, head_dim=8)


@st.composite
def mechanisms(draw):
    """Any valid combination, in plans with shared slots or without."""
    pattern = draw(st.sampled_from(['LLG', 'LG', 'G', 'GL', 'L']))
    rope, store = draw(st.booleans()), draw(st.sampled_from(['', 'tied', 'latent', 'offset']))
    if 'G' not in pattern and store in ('latent', 'offset'):
        store = ''
    tied = draw(st.sampled_from(['all'] + ['global'] * ('G' in pattern)))
    fraction = 0.0 if store == 'latent' else draw(st.sampled_from([0.0, 0.5, 1.0]))
    return GPTConfig(
        n_layer=draw(st.integers(2, 5)), n_head=4, n_embd=24, head_dim=8, vocab_size=23,
        block_size=64, n_kv_head=draw(st.sampled_from([0, 1, 2])), bias=draw(st.booleans()),
        layer_pattern=pattern, window_size=5 if 'L' in pattern else 0,
        kv_share=draw(st.sampled_from(['', *(['A' * len(pattern)] * (len(set(pattern)) == 1))])),
        share_global_kv=draw(st.booleans()), pos_embedding='rope' if rope else 'learned',
        rope_fraction_global=fraction if rope else 1.0, qk_norm=draw(st.booleans()),
        attn_sink=draw(st.booleans()), key_offset=store == 'offset',
        kv_tied=tied if store == 'tied' else '',
        kv_latent=draw(st.sampled_from([8, 24])) if store == 'latent' else 0,
        gelu=draw(st.sampled_from(['exact', 'relu2'])),
        act_clamp=draw(st.sampled_from([0.0, 1.0])), mlp_hidden=draw(st.sampled_from([0, 7])))
