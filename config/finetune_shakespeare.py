# Finetune OpenAI's GPT-2 on tiny Shakespeare, as nanoGPT does. A smaller model: --init_from=gpt2
#   python train.py config/finetune_shakespeare.py
#   python sample.py --out_dir=out-shakespeare
import time

out_dir = 'out-shakespeare'
dataset = 'shakespeare'
init_from = 'gpt2-xl'      # or 'gpt2', 'gpt2-medium', 'gpt2-large', or a folder of a model
wandb_project = 'shakespeare'
wandb_run_name = 'ft-' + str(time.time())

eval_interval = 5
eval_iters = 40
always_save_checkpoint = False  # save only if the validation loss improved

# 1 sequence * 32 micro-batches * 1024 tokens = 32,768 tokens per iteration:
# an epoch of the 301,966 tokens is about 9 iterations
batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20

# a constant learning rate
learning_rate = 3e-5
decay_lr = False
