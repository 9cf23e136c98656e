# GPT-2 (124M) as nanoGPT trains it: vanilla, context 1024, on OpenWebText.
#   python train.py config/train_gpt2.py
out_dir = 'out'
dataset = 'openwebtext'

# 12 sequences * 1024 tokens * 40 micro-batches = 491,520 tokens per iteration
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8

n_layer = 12
n_head = 12
n_embd = 768

max_iters = 600000         # 300B tokens
lr_decay_iters = 600000
weight_decay = 1e-1

eval_interval = 1000
eval_iters = 200
log_interval = 10

wandb_project = 'owt'
wandb_run_name = 'gpt2-124M'
