# The strong baseline at the demo's size: RoPE and qk_norm with a full-size KV cache (all layers
# global, a K/V head for every query head).
#   python train.py config/train_rope_mha.py
#   python sample.py config/train_rope_mha.py
out_dir = 'out-rope-mha'
dataset = 'shakespeare_bpe'  # 4,096 learned tokens, of 2.9 characters each

# size, data and steps are those of config/train_mqa_local.py
n_layer = 8
n_head = 6
n_embd = 96
block_size = 256
gelu = 'tanh'              # GPT-2's own form, and the faster one on a CPU

# the KV cache: full size
n_kv_head = 0              # each query head has its own K/V head
layer_pattern = 'G'        # every layer sees the full context
pos_embedding = 'rope'
qk_norm = True

batch_size = 8
gradient_accumulation_steps = 1
max_iters = 800
lr_decay_iters = 800
lr_schedule = 'wsd'      # constant, then a linear decay over the last 400 steps
cooldown_iters = 400
warmup_iters = 40
optimizer = 'muon'         # as in config/train_mqa_local.py, for comparison
learning_rate = 8e-3
min_lr = 1e-4
beta2 = 0.99
eval_interval = 400
eval_iters = 20
log_interval = 10
compile = False            # compiling takes longer than it saves here
