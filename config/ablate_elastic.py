# What does one training for several memories cost, against a training for each? The pilot's model
# (config/ablate_pilot.py) without key offset, at 2 tokens per parameter:
#   python ablate.py config/ablate_elastic.py
#   python ablate.py config/ablate_elastic.py --name=elastic_20 --max_iters=4000 \
#       --lr_decay_iters=4000 --cooldown_iters=800    # at 20 tokens per parameter
# A smaller model at 20 tokens per parameter, on characters of Shakespeare:
#   python ablate.py config/ablate_elastic.py --name=elastic_chars --dataset=shakespeare_works \
#       --n_embd=48 --n_head=4 --block_size=256 --contexts=256 --batch_size=20 --max_iters=680 \
#       --lr_decay_iters=680 --cooldown_iters=136 --warmup_iters=30 --eval_interval=680 --jobs=2
#   python lab/scripts/elastic.py results/elastic_chars    # the prices, paired by seed; a picture
base = 'config/code_vanilla.py'
n_embd = 80
n_head = 5
pos_embedding = 'rope'
qk_norm = True

batch_size = 10            # two sequences for each of the five plans
block_size = 512
max_iters = 320            # 5,120 tokens each
lr_schedule = 'wsd'
lr_decay_iters = 320
cooldown_iters = 64
eval_interval = 320
min_lr = 1e-4

eval_windows = 500         # a fifth of the held-out packages
seeds = '1,2,3,4'
_plans = {
    'MQA': dict(n_kv_head=1),
    'window': dict(layer_pattern='LLG', window_size=16),
    'MQA + window': dict(n_kv_head=1, layer_pattern='LLG', window_size=16),
    'MQA + window + sharing': dict(n_kv_head=1, layer_pattern='LLG', window_size=16,
                                   kv_share='AAB', share_global_kv=True),
}
# plans that the elastic model is never trained for
_between = {
    'window of 64': dict(layer_pattern='LLG', window_size=64),
    'window + sharing': dict(layer_pattern='LLG', window_size=16, kv_share='AAB'),
}
_text = '; '.join(', '.join(f'{name}={value}' for name, value in _plan.items())
                  for _plan in _plans.values())
rows = {'base alone': {}, 'elastic': dict(plans=_text),
        'elastic of 2 passes': dict(plan_passes=2)}
side_rows = {f'base in {_dtype}': ('base alone', dict(kv_dtype=_dtype))
             for _dtype in ('int8', 'int4')}
for _name, _plan in _plans.items():
    side_rows |= {
        f'{_name}, alone': ('base alone', _plan),
        f'{_name}, elastic': ('elastic', dict(at_inference=_plan)),
        f'{_name}, elastic of 2 passes': ('elastic of 2 passes', dict(at_inference=_plan)),
        f'{_name}, base cut to it': ('base alone', dict(at_inference=_plan))}
for _name, _plan in _between.items():
    side_rows |= {f'{_name}, elastic (not trained for)': ('elastic', dict(at_inference=_plan)),
                  f'{_name}, base cut to it': ('base alone', dict(at_inference=_plan))}
contexts = '512'
