# Does the price of each saving change with longer training? The rows of config/ablate_pysource.py
# in a small model of 0.8M parameters, trained on 2, 8 and 20 tokens per parameter:
#   python ablate.py config/ablate_pilot.py        # 20 tokens per parameter alone
#
# Predicted before the first run, at 20 tokens per parameter, in nats per token: MQA costs 0.03, the
# window gains 0.05 (a quarter of what it gained in config/ablate_pysource.py at 0.7 tokens per
# parameter), sharing costs 0.03, and the full stack is 0.03 better than the baseline.
base = 'config/code_vanilla.py'
n_embd = 80
n_head = 5
pos_embedding = 'rope'
qk_norm = True
key_offset = True

batch_size = 8
max_iters = 4000           # 4,096 tokens each
lr_schedule = 'wsd'
lr_decay_iters = 4000
cooldown_iters = 800
checkpoint_interval = 320
eval_interval = 4000
min_lr = 1e-4

identifiers = True
eval_windows = 500         # a fifth of the held-out packages
seeds = '1,2,3'
rows = {
    'baseline': {},
    '+ MQA': dict(n_kv_head=1),
    '+ window': dict(layer_pattern='LLG', window_size=16),
    '+ KV shared by 2': dict(kv_share='AAB'),
    'full stack': dict(share_global_kv=True, head_dim=24, mlp_hidden='match'),
}
baseline = 'baseline'
# one rate for all rows: 1e-2 unless both ends agree on a neighbour, at 2 tokens per parameter
side_rows = {f'{row} at learning rate {lr:g}': (row, dict(learning_rate=lr, seeds='1'))
             for row in ('baseline', 'full stack') for lr in (5e-3, 2e-2)}
contexts = '512'
speed = False
