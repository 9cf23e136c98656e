# Validation loss of OpenAI's gpt2-xl (1558M parameters: 48 layers, 25 heads, width 1600).
# The data set must contain GPT-2 tokens.
#   python train.py config/eval_gpt2_xl.py
init_from = 'gpt2-xl'
eval_only = True
eval_iters = 500           # many, for a precise estimate
batch_size = 8
