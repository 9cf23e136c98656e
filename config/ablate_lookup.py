# Rows of config/ablate_shakespeare.py on facts that are looked up by content, all beyond the reach
# of the local layers, 10 * (4 - 1) = 30 positions. A fixed number of steps, five seeds.
#   python ablate.py config/ablate_lookup.py --jobs=2
base = 'config/train_lookup.py'
keep_checkpoints = 100     # from which 'solved at' is measured
seeds = '1,2,3,4,5'
rows = {
    'RoPE + qk_norm MHA': {},
    '+ MQA': dict(n_kv_head=1),
    '+ window': dict(layer_pattern='LLLLLG', window_size=4),
    '+ KV shared by 2/3': dict(kv_share='AABBBC'),
    '+ global KV tied': dict(share_global_kv=True),
    '+ int8 KV': dict(kv_dtype='int8'),
    '+ int4 KV': dict(kv_dtype='int4'),
}
_FIRST = dict(layer_pattern='GLLLLL', kv_share='ABBCCC')
side_rows = {
    # control: cannot solve the task
    'local layers only': ('+ KV shared by 2/3', dict(layer_pattern='LLLLL', kv_share='AABBB')),
    'global first: GLLLLL/ABBCCC': ('+ global KV tied', _FIRST),
    'global first, int8 KV': ('global first: GLLLLL/ABBCCC', dict(kv_dtype='int8')),
    'global first, int4 KV': ('global first: GLLLLL/ABBCCC', dict(kv_dtype='int4')),
    'global first, untied': ('+ KV shared by 2/3', _FIRST),
    'untied, int4 KV': ('+ KV shared by 2/3', dict(kv_dtype='int4')),
}
baseline = 'RoPE + qk_norm MHA'
speed = False
contexts = '288'
