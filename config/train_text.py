# Your own text, on a laptop: the demo's model, trained longer. Small texts are quickly overfitted,
# so only the checkpoint with the best validation loss is kept.
#   python data/text/prepare.py --input=book.txt --tokenizer=bpe:1024
#   python train.py config/train_text.py
#   python sample.py config/train_text.py
out_dir = 'out-text'
dataset = 'text'

n_layer = 8
n_head = 6
n_embd = 96
block_size = 256
gelu = 'tanh'
dropout = 0.1

# the KV cache: see config/train_mqa_local.py
n_kv_head = 1
layer_pattern = 'LLLG'
window_size = 64
kv_share = 'AABC'
share_global_kv = True
pos_embedding = 'rope'
qk_norm = True
mlp_hidden = 464

batch_size = 8
gradient_accumulation_steps = 1
max_iters = 1000
lr_decay_iters = 1000
warmup_iters = 40
optimizer = 'muon'
learning_rate = 6e-3
min_lr = 6e-4
beta2 = 0.99
eval_interval = 100
eval_iters = 20
always_save_checkpoint = False
log_interval = 10
compile = False
