# From GPT-2 to the full stack, one change at a time, and what each mechanism that others use costs
# in it: loss, recall, KV bytes, speed. Eight seeds, fixed before the first run; about ten hours on
# 2 CPU cores.
#   python ablate.py config/ablate_prices.py --jobs=2
#   python ablate.py config/ablate_prices.py --dry_run=True
base = 'config/char_vanilla.py'
batch_size = 4
max_iters = 800
lr_decay_iters = 800
warmup_iters = 80
learning_rate = 1.2e-2     # best of three for the baseline and the full stack: the last rows
min_lr = 1.2e-3
eval_interval = 200
checkpoint_interval = 200
eval_windows = 600         # a third of the held-out text

seeds = '1,2,3,4,5,6,7,8'
rows = {
    'vanilla GPT-2': {},
    '+ RoPE': dict(pos_embedding='rope'),
    '+ qk_norm': dict(qk_norm=True),  # the strongest baseline with full memory
    '+ MQA': dict(n_kv_head=1),
    '+ window': dict(layer_pattern='LLLLLG', window_size=32),  # T/8; one global layer in six
    '+ KV shared by 2/3': dict(kv_share='AABBBC'),
    '+ global KV tied': dict(share_global_kv=True),
    # spends the parameters saved in K and V
    '+ wider heads and MLP': dict(head_dim=24, mlp_hidden='match'),
    '+ int8 KV': dict(kv_dtype='int8'),  # the same weights with an int8 cache
}
_FULL = '+ wider heads and MLP'
_NOPE = dict(rope_fraction_global=0.0)
# mechanisms that others use, each in the full stack (how to add one: docs/ablations.md)
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
    'int4 KV': (_FULL, dict(kv_dtype='int4')),
    'int8 weights': ('+ int8 KV', dict(weight_dtype='int8')),  # W8A8: activations too
    'tied at inference only': ('+ KV shared by 2/3', dict(
        at_inference=dict(share_global_kv=True))),
}
# other forms of the memory
_FEW = dict(seeds='1,2,3')
side_rows |= {
    'GQA': ('+ qk_norm', dict(n_kv_head=2) | _FEW),  # four query heads per K/V head
    'window T/4': (_FULL, dict(window_size=64) | _FEW),
    'untied': (_FULL, dict(share_global_kv=False) | _FEW),
    'global first: GLLLLL/ABBCCC': (_FULL, dict(layer_pattern='GLLLLL', kv_share='ABBCCC') | _FEW),
}
# other ways to train (their cost: docs/training.md)
_ONE = dict(seeds='1')
_ADAMW = dict(optimizer='adamw', learning_rate=6e-3, min_lr=6e-4)
_TWICE = dict(max_iters=1600, lr_decay_iters=1600, warmup_iters=160)
side_rows |= {
    'AdamW, twice the steps': (_FULL, _ADAMW | _TWICE | _FEW),
    'int8 in training': (_FULL, dict(kv_quant_train='int8', kv_dtype='int8') | _ONE),
}
# uptraining (GQA, Ainslie et al. 2023): converted weights of the strongest baseline, trained for a
# tenth of the steps
_SHORT = dict(converted_from='+ qk_norm', max_iters=80, lr_decay_iters=80, warmup_iters=8,
              learning_rate=6e-3, min_lr=6e-4, eval_interval=10) | _ONE
side_rows |= {
    'uptrained to MQA': ('+ MQA', _SHORT),
    'uptrained to all but wider heads': ('+ global KV tied', _SHORT),
}
# other learning rates
for _row in ('vanilla GPT-2', '+ qk_norm', _FULL):
    for _lr in (6e-3, 2.4e-2):
        side_rows[f"{_row.lstrip('+ ')} at learning rate {_lr:g}"] = (
            _row, dict(learning_rate=_lr, min_lr=_lr / 10) | _ONE)

baseline = '+ qk_norm'
recall = 'ablate_recall,ablate_lookup'
contexts = '256,1024,4096'
batch_sizes = '1,16'
