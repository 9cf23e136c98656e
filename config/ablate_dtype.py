# Does training in bfloat16 change what is learned? Both ends of config/ablate_prices.py, trained in
# float32 and in bfloat16 from the same seeds. An hour and a half on 2 cores with AVX-512 BF16.
#   python ablate.py config/ablate_dtype.py --jobs=2
base = 'config/char_vanilla.py'
batch_size = 4
max_iters = 800
lr_decay_iters = 800
warmup_iters = 80
learning_rate = 1.2e-2
min_lr = 1.2e-3
eval_interval = 800
eval_windows = 600
rows = {
    'vanilla GPT-2': dict(dtype='float32', seeds='1,2,3,4,5,6,7,8,9,10,11,12'),  # they vary more
    'full stack': dict(pos_embedding='rope', qk_norm=True, n_kv_head=1, layer_pattern='LLLLLG',
                       window_size=32, kv_share='AABBBC', share_global_kv=True, head_dim=24,
                       mlp_hidden='match', seeds='1,2,3'),
}
side_rows = {f'{row} in bfloat16': (row, dict(dtype='bfloat16', seeds=changes['seeds']))
             for row, changes in rows.items()}
baseline = 'vanilla GPT-2'
speed = False
contexts = '256'
pictures = False
