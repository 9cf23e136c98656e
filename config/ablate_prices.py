# What each saving and each mechanism costs, with intervals that separate: the rows of
# config/ablate_shakespeare.py, trained with Muon on as many tokens as 400 steps of 8 sequences, in
# 800 steps of 4 (the loss of + qk_norm: 1.63 instead of 1.71). Eight seeds, fixed before the first
# run.
#   python ablate.py config/ablate_prices.py --jobs=2
import config.ablate_shakespeare as _shakespeare

base = 'config/char_vanilla.py'
batch_size = 4
max_iters = 800
lr_decay_iters = 800
warmup_iters = 80
learning_rate = 1.2e-2
min_lr = 1.2e-3
eval_interval = 200
checkpoint_interval = 200
eval_windows = 600         # a third of the held-out text

seeds = '1,2,3,4,5,6,7,8'
rows = dict(_shakespeare.rows)

side_rows = {name: _shakespeare.side_rows[name] for name in (
    'attention sinks', 'NoPE on global layers', 'RoPE on a quarter of global dimensions',
    'key offset', 'K = V', 'K = V on global layers, NoPE', 'latent of 48 on global layers, NoPE',
    'suffix sharing', 'ReLU squared', 'attention z-loss', 'clamped, int8 forward', 'int4 KV')}
# other forms of the memory
for _name in ('GQA', 'MHA with heads of 24', 'window T/4', 'window T/2', 'shared by 2',
              'shared by 5', 'untied', 'global first: GLLLLL/ABBCCC', 'int8 weights',
              'tied at inference only'):
    _above, _changes = _shakespeare.side_rows[_name]
    side_rows[_name] = (_above, _changes | dict(seeds='1,2,3'))
# to choose the learning rate of all rows, before the other seeds are run
for _row in ('vanilla GPT-2', '+ qk_norm', '+ wider heads and MLP'):
    for _lr in (6e-3, 2.4e-2):
        side_rows[f"{_row.lstrip('+ ')} at learning rate {_lr:g}"] = (
            _row, dict(learning_rate=_lr, min_lr=_lr / 10, seeds='1'))

baseline = '+ qk_norm'
recall = 'ablate_recall,ablate_lookup'
contexts = '256,1024,4096'
