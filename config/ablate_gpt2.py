# The ladder in GPT-2 124M's shape, for a GPU. The text is the Python source of the installed
# packages, so that no network is needed.
#   packages="$(python -c 'import site; print(site.getsitepackages()[0])')"
#   python data/text/prepare.py --input "$packages" --glob '*.py'
#   python ablate.py config/ablate_gpt2.py
import config.ablate_shakespeare as _small

base = 'config/train_gpt2.py'
dataset = 'text'

batch_size = 16
gradient_accumulation_steps = 8       # 131,072 tokens an iteration
max_iters = 2000
lr_decay_iters = 2000
warmup_iters = 200
eval_interval = 200
eval_iters = 50
checkpoint_interval = 200
log_interval = 10

seeds = '1'
rows = dict(_small.rows)
rows['+ window'] = dict(layer_pattern='LLLLLG', window_size=256)
del rows['+ wider heads and MLP']  # heads of 64 are wide enough
rows |= {'+ wider MLP': dict(mlp_hidden='match'), '+ int8 KV': rows.pop('+ int8 KV')}

eval_windows = 512
contexts = '1024,4096,16384,32768'
batch_sizes = '1,16,64'
