# GPT-2's shape (12 layers, 12 heads of 64, context 1024) with a KV cache 72 times smaller,
# on OpenWebText.
#   python train.py config/train_gpt2_mqa_local.py
out_dir = 'out-gpt2-mqa-local'
dataset = 'openwebtext'

# 12 sequences * 1024 tokens * 40 micro-batches = 491,520 tokens per iteration
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8

n_layer = 12
n_head = 12
n_embd = 768

# the KV cache
n_kv_head = 1
layer_pattern = 'LLLLLG'
window_size = 256
kv_share = 'AABBBC'
share_global_kv = True
pos_embedding = 'rope'
qk_norm = True
mlp_hidden = 3840          # larger than 4 * 768, to match GPT-2's parameter count (to 0.3%)

max_iters = 600000         # 300B tokens
lr_decay_iters = 600000
weight_decay = 1e-1

eval_interval = 1000
eval_iters = 200
log_interval = 10

wandb_project = 'owt'
wandb_run_name = 'gpt2-124M-mqa-local'
