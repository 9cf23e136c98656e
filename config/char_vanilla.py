# Vanilla GPT-2 on characters of Shakespeare: what the rows of the ladders (ablate_*.py) start from.
#   python train.py config/char_vanilla.py
out_dir = 'out-char-vanilla'
dataset = 'shakespeare_works'

n_layer = 12
n_head = 8
n_embd = 128
block_size = 256
gelu = 'tanh'              # GPT-2's own form, and the faster one on a CPU

# the KV cache: full size
n_kv_head = 0              # each query head has its own K/V head
layer_pattern = 'G'        # every layer sees the full context
pos_embedding = 'learned'

batch_size = 8
gradient_accumulation_steps = 1
max_iters = 400
lr_decay_iters = 400
warmup_iters = 40
optimizer = 'muon'
learning_rate = 6e-3
min_lr = 6e-4
beta2 = 0.99
eval_interval = 200
eval_iters = 20
log_interval = 10
compile = False            # compiling takes longer than it saves here
