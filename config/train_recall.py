# Recall of random tokens at marked distances, which shows how far back a model can see
# (data/recall/tasks.py).
#   python train.py config/train_recall.py
#   python ablate.py config/ablate_recall.py       # ladder of ever smaller caches
out_dir = 'out-recall'
dataset = 'recall'
recall_task = 'distances=3,16,47'

n_layer = 12
n_head = 4
n_embd = 64
block_size = 96
gelu = 'tanh'

batch_size = 32
gradient_accumulation_steps = 1
max_iters = 400
lr_decay_iters = 400
warmup_iters = 50
learning_rate = 2e-3
min_lr = 2e-4
beta2 = 0.98
weight_decay = 0.01
eval_interval = 100
eval_iters = 4
log_interval = 10
compile = False
