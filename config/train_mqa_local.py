# The demo: a character-level Shakespeare GPT with the smallest KV cache, trained in about
# 3 minutes on 2 CPU cores.
#   python train.py config/train_mqa_local.py
#   python sample.py config/train_mqa_local.py
out_dir = 'out-mqa-local'
dataset = 'shakespeare_works'

# size, data and steps are those of config/train_vanilla.py and config/train_rope_mha.py
n_layer = 12
n_head = 8
n_embd = 128
block_size = 256
gelu = 'tanh'              # GPT-2's own form, and the faster one on a CPU

# the KV cache
n_kv_head = 1              # multi-query: the 8 query heads of a layer share one K/V head
layer_pattern = 'LLLLLG'   # five local layers, then one global, repeated twice
window_size = 64           # a local layer sees the last 64 characters
kv_share = 'AABBBC'        # local layers share caches in groups of two and three
share_global_kv = True     # both global layers share one cache
pos_embedding = 'rope'
qk_norm = True
mlp_hidden = 632           # larger than 4 * 128, to match the parameters of the other two

batch_size = 8
gradient_accumulation_steps = 1
max_iters = 400
lr_decay_iters = 400
warmup_iters = 40
optimizer = 'muon'         # 400 steps reach nearly the loss of 1,000 with AdamW (docs/training.md)
learning_rate = 6e-3
min_lr = 6e-4
beta2 = 0.99
eval_interval = 200
eval_iters = 20
log_interval = 10
compile = False            # compiling takes longer than it saves here
