# What memory costs in GPT-2 124M's shape, on one GPU: 39M tokens of Python source a row, 2.3
# times the data. In pieces, each of which goes on where the last one ended:
#   python data/pysource/prepare.py                                # 37 MB, without a GPU
#   timeout --signal=TERM 9m python ablate.py config/ablate_gpu.py
base = 'config/train_gpt2.py'
dataset = 'pysource'
identifiers = True

batch_size = 32
gradient_accumulation_steps = 1       # 32,768 tokens an iteration
max_iters = 1200
lr_decay_iters = 1200
warmup_iters = 60
optimizer = 'muon'
learning_rate = 2e-3
min_lr = 2e-4
eval_interval = 200
eval_iters = 20
checkpoint_interval = 200
log_interval = 10

seeds = '1'
rows = {
    'vanilla GPT-2': {},
    '+ RoPE, qk_norm': dict(pos_embedding='rope', qk_norm=True),  # the strongest baseline
    # local layers reach 10 * (32 - 1) = 310 tokens together
    'full stack': dict(n_kv_head=1, layer_pattern='LLLLLG', window_size=32, kv_share='AABBBC',
                       share_global_kv=True, mlp_hidden='match'),
    '+ int8 KV': dict(kv_dtype='int8'),
}
side_rows = {
    'key offset': ('full stack', dict(key_offset=True)),
    'K = V on global layers, NoPE': ('full stack', dict(
        kv_tied='global', rope_fraction_global=0.0)),
    'local layers only': ('full stack', dict(
        layer_pattern='LLLLLL', kv_share='AABBCC', share_global_kv=False)),
}
baseline = '+ RoPE, qk_norm'

contexts = '1024,8192'
