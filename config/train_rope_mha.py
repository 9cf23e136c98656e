# The strong full-memory baseline at the demo's size: RoPE and qk_norm, but every layer global and every head its own K/V.
#   python train.py config/train_rope_mha.py
#   python sample.py config/train_rope_mha.py
out_dir = 'out-rope-mha'
dataset = 'shakespeare_works'

# size, data and steps are those of config/train_mqa_local.py
n_layer = 12
n_head = 8
n_embd = 128
block_size = 256
gelu = 'tanh'              # GPT-2's own form, and the faster one on a CPU

# what it remembers: everything
n_kv_head = 0              # each head has K and V of its own
layer_pattern = 'G'        # every layer sees the whole context
pos_embedding = 'rope'
qk_norm = True

batch_size = 8
gradient_accumulation_steps = 1
max_iters = 400
lr_decay_iters = 400
warmup_iters = 40
optimizer = 'muon'         # as config/train_mqa_local.py, beside which this stands
learning_rate = 6e-3
min_lr = 6e-4
beta2 = 0.99
eval_interval = 200
eval_iters = 20
log_interval = 10
compile = False            # compiling takes longer than it saves here
