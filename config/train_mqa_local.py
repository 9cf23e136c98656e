# The demo: a Shakespeare GPT with the smallest KV cache, trained in 3 to 4 minutes on 2 CPU cores.
#   python train.py config/train_mqa_local.py
#   python sample.py config/train_mqa_local.py
out_dir = 'out-mqa-local'
dataset = 'shakespeare_bpe'  # 4,096 learned tokens, of 2.9 characters each

# size, data and steps are those of config/train_vanilla.py and config/train_rope_mha.py
n_layer = 8
n_head = 6
n_embd = 96
block_size = 256
gelu = 'tanh'              # GPT-2's own form, and the faster one on a CPU

# the KV cache
n_kv_head = 1              # multi-query: the 6 query heads of a layer share one K/V head
layer_pattern = 'LLLG'     # three local layers, then one global, repeated twice
window_size = 32           # a local layer sees the last 32 tokens
kv_share = 'AABC'          # the first two local layers of each four share a cache
share_global_kv = True     # both global layers share one cache
pos_embedding = 'rope'
qk_norm = True
mlp_hidden = 464           # larger than 4 * 96, to match the parameters of the other two

batch_size = 8
gradient_accumulation_steps = 1
max_iters = 800
lr_decay_iters = 800
lr_schedule = 'wsd'      # constant, then a linear decay over the last 400 steps
cooldown_iters = 400
warmup_iters = 40
optimizer = 'muon'         # needs half of AdamW's steps (docs/training.md)
learning_rate = 8e-3
min_lr = 1e-4
beta2 = 0.99
eval_interval = 400
eval_iters = 20
log_interval = 10
compile = False            # compiling takes longer than it saves here
