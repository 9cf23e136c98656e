# How many facts, looked up by content, a cache holds for its bytes. All of them are beyond the
# reach of the local layers, 4 * (4 - 1) = 12 positions. 6 layers, five seeds, a fixed number of
# steps.
#   python ablate.py config/ablate_lookup.py --jobs=2
base = 'config/train_lookup.py'
seeds = '1,2,3,4,5'
_STEP = dict(seeds='1,2,3')  # on the way to the default plan
rows = {
    'MHA with key offset': {},
    '+ MQA': dict(n_kv_head=1) | _STEP,
    '+ window': dict(layer_pattern='LLG', window_size=4) | _STEP,
    '+ KV shared by 2': dict(kv_share='AAB') | _STEP,
    '+ global KV tied': dict(share_global_kv=True),
    '+ int8 KV': dict(kv_dtype='int8'),
    '+ int4 KV': dict(kv_dtype='int4'),
}
_PLAIN = dict(key_offset=False)  # local layers see the key, too
_FIRST = dict(layer_pattern='GLL', kv_share='ABB')
_NOPE = dict(rope_fraction_global=0.0)
_INT8, _INT4 = dict(kv_dtype='int8'), dict(kv_dtype='int4')
side_rows = {
    'global last, tied': ('+ global KV tied', _PLAIN),
    'global last, tied, int8 KV': ('global last, tied', _INT8),
    'global last, tied, int4 KV': ('global last, tied', _INT4),
    'global last, untied': ('+ KV shared by 2', _PLAIN),
    'global last, untied, int8 KV': ('global last, untied', _INT8),
    'global last, untied, int4 KV': ('global last, untied', _INT4),
    'global first, tied': ('global last, tied', _FIRST),
    'global first, tied, int8 KV': ('global first, tied', _INT8),
    'global first, tied, int4 KV': ('global first, tied', _INT4),
    'global first, untied': ('global last, untied', _FIRST),
    'global first, untied, int8 KV': ('global first, untied', _INT8),
    'global first, untied, int4 KV': ('global first, untied', _INT4),
    # mechanisms that others use
    **{name: ('global last, tied', changes | _STEP) for name, changes in {
        'attention sinks': dict(attn_sink=True),
        'NoPE on global layers': _NOPE,
        'RoPE on a quarter of global dimensions': dict(rope_fraction_global=0.25),
        'K = V': dict(kv_tied='all'),
        'K = V on global layers, NoPE': dict(kv_tied='global', **_NOPE),
        'latent of 16 on global layers, NoPE': dict(kv_latent=16, **_NOPE),
        'suffix sharing': dict(layer_pattern='LLGGGG', kv_share='AABBBB'),
        'ReLU squared': dict(gelu='relu2')}.items()},
    # controls: with and without the key before, and without memory
    'global first, tied, key offset': ('global first, tied', dict(key_offset=True, seeds='1')),
    'MHA': ('MHA with key offset', dict(key_offset=False, seeds='1,2')),
    'local layers only': ('global last, untied', dict(layer_pattern='LL', kv_share='AA',
                                                      seeds='1,2')),
}
baseline = 'MHA with key offset'
speed = False
contexts = '288'
