# Validation loss of OpenAI's gpt2 (124M parameters: 12 layers, 12 heads, width 768).
# The data set must contain GPT-2 tokens.
#   python train.py config/eval_gpt2.py
init_from = 'gpt2'
eval_only = True
eval_iters = 500           # many, for a precise estimate
batch_size = 8
