# GPT-2 124M's shape in under 9 minutes on one H200-class GPU: too short to compare losses, long
# enough to test everything on it and to measure training steps and decoding. The text is Python
# source, one token per character, so that no network is needed.
#   torch="$(python -c 'import torch, os; print(os.path.dirname(torch.__file__))')"
#   python data/text/prepare.py --input "$torch" --glob '*.py'
#   python ablate.py config/ablate_gpu_short.py
base = 'config/train_gpt2.py'
dataset = 'text'

batch_size = 32
gradient_accumulation_steps = 1       # 32,768 tokens an iteration
max_iters = 200
lr_decay_iters = 200
warmup_iters = 20
learning_rate = 1e-3
min_lr = 1e-4
eval_interval = 100
eval_iters = 10
log_interval = 10

seeds = '1'
rows = {
    'vanilla GPT-2': {},
    '+ RoPE, qk_norm': dict(pos_embedding='rope', qk_norm=True),
    '+ MQA, window, shared': dict(n_kv_head=1, layer_pattern='LLLLLG', window_size=256,
                                  kv_share='AABBBC', share_global_kv=True, mlp_hidden='match'),
    '+ int8 KV': dict(kv_dtype='int8'),
}
baseline = '+ RoPE, qk_norm'

eval_windows = 32
contexts = '1024,8192'
batch_sizes = '1,64'
