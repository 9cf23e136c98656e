# The ladder in GPT-2 124M's shape, for a GPU. Needs no network there: the text is the Python source of the installed packages.
#   python data/text/prepare.py --input "$(python -c 'import site; print(site.getsitepackages()[0])')" --glob '*.py'
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
rows = {name: change for name, change in _small.rows.items() if change != _small.rows['+ wider heads and MLP']}
rows['+ window'] = dict(layer_pattern='LLLLLG', window_size=256)
rows |= {'+ wider MLP': dict(mlp_hidden='match'), '+ int8 KV': rows.pop('+ int8 KV')}  # heads of 64 are wide enough

eval_windows = 512
contexts = '1024,4096,16384,32768'
batch_sizes = '1,16,64'
