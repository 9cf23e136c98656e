# Facts looked up by content (data/recall/tasks.py): how many can a small KV cache hold?
#   python train.py config/train_lookup.py
#   python ablate.py config/ablate_lookup.py       # ladder of ever smaller caches
out_dir = 'out-lookup'
dataset = 'lookup'
lookup_task = 'pairs=2,4,8,16,32,64 gap=32'

n_layer = 6
n_head = 4
n_embd = 64
mlp_hidden = 128
block_size = 288
gelu = 'tanh'
pos_embedding = 'rope'
qk_norm = True

# the value of a fact is found by the key before it: with key_offset, layers see that at once
key_offset = True

# a fixed set of 12,800 sequences, and every token a target; AdamW stays at chance much longer
batch_size = 32
gradient_accumulation_steps = 1
max_iters = 500
lr_decay_iters = 500
warmup_iters = 50
optimizer = 'muon'
learning_rate = 1e-2
min_lr = 1e-3
beta2 = 0.98
weight_decay = 0.1
eval_interval = 50
eval_iters = 4
log_interval = 10
compile = False
