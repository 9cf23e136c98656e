# A small ladder in under two minutes: tiny models, few steps. It shows how ablations work; its
# losses are meaningless.
#   python ablate.py config/ablate_smoke.py
base = 'config/char_vanilla.py'

n_layer = 3
n_head = 4
n_embd = 64
block_size = 64
batch_size = 8
max_iters = 60
lr_decay_iters = 60
warmup_iters = 10
eval_interval = 20
eval_iters = 2

seeds = '1,2'
rows = {
    'vanilla GPT-2': {},
    '+ RoPE, MQA': dict(pos_embedding='rope', n_kv_head=1),
    '+ window, wider MLP': dict(layer_pattern='LLG', window_size=16, mlp_hidden='match'),
    '+ int8 KV': dict(kv_dtype='int8'),
}
side_rows = {
    'shared at inference only': ('+ window, wider MLP', dict(at_inference=dict(kv_share='AAB'))),
}
jobs = 2

eval_windows = 64
contexts = '64,256'
