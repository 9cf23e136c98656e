# The key rows of config/ablate_prices.py, trained on twelve times as many tokens, with AdamW.
#   python ablate.py config/ablate_long.py --jobs=2
base = 'config/char_vanilla.py'
pos_embedding = 'rope'
qk_norm = True
optimizer = 'adamw'

max_iters = 5000
lr_decay_iters = 5000
warmup_iters = 100
eval_interval = 250
checkpoint_interval = 250

seeds = '1'
rows = {
    'RoPE + qk_norm MHA': {},
    'full stack': dict(n_kv_head=1, layer_pattern='LLLLLG', window_size=32, kv_share='AABBBC',
                       share_global_kv=True, head_dim=24, mlp_hidden='match'),
    '+ int8 KV': dict(kv_dtype='int8'),
}
speed = False
contexts = '256'
