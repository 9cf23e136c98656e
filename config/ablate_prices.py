# What each saving and each mechanism costs, with intervals that separate: the rows of
# config/ablate_shakespeare.py, trained with Muon in 400 steps (AdamW needs 1,000 for that loss),
# eight seeds, fixed before the first run.
#   python ablate.py config/ablate_prices.py --jobs=2
import config.ablate_shakespeare as _shakespeare

base = 'config/char_vanilla.py'
eval_interval = 100
checkpoint_interval = 100

seeds = '1,2,3,4,5,6,7,8'
rows = dict(_shakespeare.rows)

_FULL = '+ wider heads and MLP'
_NOPE = dict(rope_fraction_global=0.0)
side_rows = {
    'attention sinks': (_FULL, dict(attn_sink=True)),
    'NoPE on global layers': (_FULL, _NOPE),
    'RoPE on a quarter of global dimensions': (_FULL, dict(rope_fraction_global=0.25)),
    'key offset': (_FULL, dict(key_offset=True)),
    'K = V': (_FULL, dict(kv_tied='all')),
    'K = V on global layers, NoPE': (_FULL, dict(kv_tied='global', **_NOPE)),
    'latent of 48 on global layers, NoPE': (_FULL, dict(kv_latent=48, **_NOPE)),
    # YOCO: layers 6 to 11 read the K and V of layer 5
    'suffix sharing': (_FULL, dict(layer_pattern='LLLLLGGGGGGG', kv_share='AABBBCCCCCCC')),
    'ReLU squared': (_FULL, dict(gelu='relu2')),
    'attention z-loss': (_FULL, dict(attention_z_loss=1e-4)),
    'clamped, int8 forward': (_FULL, dict(
        act_clamp=4.0, int8_forward=True, kv_quant_train='int8', kv_dtype='int8',
        weight_dtype='int8')),
    'int4 KV': (_FULL, dict(kv_dtype='int4')),
    'int8 weights': ('+ int8 KV', dict(weight_dtype='int8')),  # W8A8: activations too
    'tied at inference only': ('+ KV shared by 2/3', dict(
        at_inference=dict(share_global_kv=True))),
}
# other forms of the memory
_SEEDS = dict(seeds='1,2,3')
side_rows |= {
    'GQA': ('+ qk_norm', dict(n_kv_head=2) | _SEEDS),  # four query heads per K/V head
    # only the gain from wider heads
    'MHA with heads of 24': ('+ qk_norm', dict(head_dim=24, mlp_hidden='match') | _SEEDS),
    'window T/4': (_FULL, dict(window_size=64) | _SEEDS),
    'window T/2': (_FULL, dict(window_size=128) | _SEEDS),
    # local caches of two, two and one layer
    'shared by 2': (_FULL, dict(kv_share='AABBCD') | _SEEDS),
    'shared by 5': (_FULL, dict(kv_share='AAAAAB') | _SEEDS),
    'untied': (_FULL, dict(share_global_kv=False) | _SEEDS),
    'global first: GLLLLL/ABBCCC': (_FULL, dict(
        layer_pattern='GLLLLL', kv_share='ABBCCC') | _SEEDS),
}
# the learning rate of all rows (6e-3) was chosen with these
for _row in ('vanilla GPT-2', '+ qk_norm', _FULL):
    for _lr in (3e-3, 1.2e-2):
        side_rows[f"{_row.lstrip('+ ')} at learning rate {_lr:g}"] = (
            _row, dict(learning_rate=_lr, min_lr=_lr / 10, seeds='1'))

baseline = '+ qk_norm'
recall = 'ablate_recall'
contexts = '256,1024,4096'
