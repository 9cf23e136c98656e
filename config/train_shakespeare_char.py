# nanoGPT's character-level GPT on tiny Shakespeare, for one GPU (10.6M parameters).
#   python train.py config/train_shakespeare_char.py
#   python sample.py --out_dir=out-shakespeare-char
# On a CPU, smaller and shorter (nanoGPT's own CPU recipe):
#   python train.py config/train_shakespeare_char.py --device=cpu --compile=False \
#       --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 \
#       --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0
out_dir = 'out-shakespeare-char'
dataset = 'shakespeare_char'
wandb_project = 'shakespeare-char'
wandb_run_name = 'mini-gpt'

# the model overfits this small data set: evaluate often and keep only the best checkpoint
eval_interval = 250
eval_iters = 200
log_interval = 10
always_save_checkpoint = False

gradient_accumulation_steps = 1
batch_size = 64
block_size = 256

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2

learning_rate = 1e-3       # small models tolerate high learning rates
min_lr = 1e-4              # learning_rate / 10
max_iters = 5000
lr_decay_iters = 5000
warmup_iters = 100
beta2 = 0.99               # few tokens per iteration, so average over more of them
