# Does each plan of an elastic model recall what its windows cannot reach, 47 positions back?
#   python ablate.py config/ablate_elastic_recall.py --jobs=2
base = 'config/train_recall.py'
pos_embedding = 'rope'
qk_norm = True
seeds = '1,2,3,4'
_LOCAL = dict(layer_pattern='LLLLLG', window_size=4)
_SHARED = _LOCAL | dict(n_kv_head=1, kv_share='AABBBC')
_plans = {'window': _LOCAL, 'MQA + window': _LOCAL | dict(n_kv_head=1),
          'MQA + window + sharing': _SHARED,
          'MQA + window + sharing, tied': _SHARED | dict(share_global_kv=True)}
rows = {'elastic': dict(plans='; '.join(
    ', '.join(f'{name}={value}' for name, value in _plan.items()) for _plan in _plans.values()))}
side_rows = {name: ('elastic', dict(at_inference=_plan)) for name, _plan in _plans.items()}
contexts = '96'
