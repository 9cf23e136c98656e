# The rows of config/ablate_prices.py with AdamW and three seeds, other forms of the memory, and
# their speed. 57 trainings: many hours on 2 CPU cores.
#   python ablate.py config/ablate_shakespeare.py --jobs=2
#   python ablate.py config/ablate_shakespeare.py --dry_run=True
base = 'config/char_vanilla.py'
optimizer = 'adamw'        # GPT-2's; Muon is a side row

max_iters = 1000
lr_decay_iters = 1000
warmup_iters = 100
eval_interval = 100
checkpoint_interval = 100

seeds = '1,2,3'
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

# rows that each change one thing in the full stack (or in another row), with one seed
side_seeds = '1'
_FULL = '+ wider heads and MLP'
side_rows = {
    'GQA': ('+ qk_norm', dict(n_kv_head=2)),  # four query heads per K/V head
    # only the gain from wider heads
    'MHA with heads of 24': ('+ qk_norm', dict(head_dim=24, mlp_hidden='match')),
    'int8 in training': (_FULL, dict(kv_quant_train='int8', kv_dtype='int8')),
    'heads of 16': (_FULL, dict(head_dim=0)),
    'heads of 16, window T/4': (_FULL, dict(head_dim=0, window_size=64)),
    'window T/4': (_FULL, dict(window_size=64)),
    'window T/2': (_FULL, dict(window_size=128)),
    'shared by 2': (_FULL, dict(kv_share='AABBCD')),  # local caches of two, two and one layer
    'shared by 5': (_FULL, dict(kv_share='AAAAAB')),
    'untied': (_FULL, dict(share_global_kv=False)),
    'tied at inference only': ('+ KV shared by 2/3', dict(
        at_inference=dict(share_global_kv=True), seeds='1,2,3')),
    'global first: GLLLLL/ABBCCC': (_FULL, dict(
        layer_pattern='GLLLLL', kv_share='ABBCCC', seeds='1,2,3')),
    'global first, untied': (_FULL, dict(
        layer_pattern='GLLLLL', kv_share='ABBCCC', share_global_kv=False)),
    # W8A8: activations too
    'int8 weights': ('+ int8 KV', dict(weight_dtype='int8', seeds='1,2,3')),
}
# mechanisms that others use, each in the full stack (how to add one: docs/ablations.md)
_NOPE = dict(rope_fraction_global=0.0)
side_rows |= {
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
}
# other ways to train the full stack (their cost: docs/training.md)
side_rows |= {
    'Muon': (_FULL, dict(optimizer='muon', seeds='1,2,3')),
    'Muon, 500 steps': (_FULL, dict(optimizer='muon', max_iters=500, lr_decay_iters=500,
                                    warmup_iters=50, seeds='1,2,3')),
    'Muon, 400 steps': (_FULL, dict(optimizer='muon', max_iters=400, lr_decay_iters=400,
                                    warmup_iters=40, seeds='1,2,3')),
    'qk_norm, Muon': ('+ qk_norm', dict(optimizer='muon')),
    'int8 products': (_FULL, dict(int8_training=True, kv_quant_train='int8',  # int8 matmuls
                                  kv_dtype='int8')),
}
# uptraining (GQA, Ainslie et al. 2023): converted weights of the strongest baseline, trained for a
# tenth of the steps
_SHORT = dict(converted_from='+ qk_norm', max_iters=100, lr_decay_iters=100, warmup_iters=10,
              learning_rate=3e-3, min_lr=3e-4, eval_interval=10)
side_rows |= {
    'uptrained to MQA': ('+ MQA', _SHORT),
    'uptrained to all but wider heads': ('+ global KV tied', _SHORT),
}
# other learning rates for the key rows (all other rows: 6e-3); vanilla GPT-2 needs a lower one
_RATES = {'vanilla GPT-2': (1.5e-3, 3e-3), '+ qk_norm': (3e-3, 9e-3), _FULL: (3e-3, 9e-3)}
for _row, _rates in _RATES.items():
    for _lr in _rates:
        _name = f"{_row.lstrip('+ ')} at learning rate {_lr:g}"
        side_rows[_name] = (_row, dict(learning_rate=_lr, min_lr=_lr / 10))

baseline = '+ qk_norm'
recall = 'ablate_recall'
contexts = '256,1024,4096'
batch_sizes = '1,16'
