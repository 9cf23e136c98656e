# The demo: a character-level Shakespeare GPT with every saving on, in about 4 minutes on 2 CPU cores.
#   python train.py config/train_mqa_local.py
#   python sample.py config/train_mqa_local.py
out_dir = 'out-mqa-local'
dataset = 'shakespeare_works'

# the same size, data and steps as config/train_vanilla.py and config/train_rope_mha.py
n_layer = 12
n_head = 8
n_embd = 128
block_size = 256

# what it remembers
n_kv_head = 1              # multi-query: the 8 query heads of a layer share one K/V head
layer_pattern = 'LLLLLG'   # five local layers, then one global; twice over
window_size = 64           # a local layer sees the last 64 characters
kv_share = 'AABBBC'        # local layers share a cache by twos and threes
share_global_kv = True     # both global layers share one
pos_embedding = 'rope'
qk_norm = True

batch_size = 16
gradient_accumulation_steps = 1
max_iters = 400
lr_decay_iters = 400
warmup_iters = 40
learning_rate = 3e-3
min_lr = 3e-4
beta2 = 0.99
eval_interval = 100
eval_iters = 20
log_interval = 10
compile = False            # compiling takes longer than it saves here
