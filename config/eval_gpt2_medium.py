# Validation loss of OpenAI's gpt2-medium (355M parameters: 24 layers, 16 heads, width 1024).
# The data set must contain GPT-2 tokens.
#   python train.py config/eval_gpt2_medium.py
init_from = 'gpt2-medium'
eval_only = True
eval_iters = 500           # many, for a precise estimate
batch_size = 8
