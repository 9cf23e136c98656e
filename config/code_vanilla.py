# Vanilla GPT-2 on Python source: what the rows of config/ablate_pysource.py start from.
#   python train.py config/code_vanilla.py
out_dir = 'out-code-vanilla'
dataset = 'pysource'       # 4,096 learned tokens, of 3.5 characters each

n_layer = 6
n_head = 4
n_embd = 128
block_size = 512
gelu = 'tanh'

# the KV cache: full size
n_kv_head = 0
layer_pattern = 'G'
pos_embedding = 'learned'

batch_size = 4
gradient_accumulation_steps = 1
max_iters = 600
lr_decay_iters = 600
warmup_iters = 60
optimizer = 'muon'
learning_rate = 1e-2
min_lr = 1e-3
beta2 = 0.99
eval_interval = 200
eval_iters = 20
log_interval = 10
compile = False
