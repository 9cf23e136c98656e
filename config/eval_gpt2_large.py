# Validation loss of OpenAI's gpt2-large (774M parameters: 36 layers, 20 heads, width 1280).
# The data set must contain GPT-2 tokens.
#   python train.py config/eval_gpt2_large.py
init_from = 'gpt2-large'
eval_only = True
eval_iters = 500           # many, for a precise estimate
batch_size = 8
