# From GPT-2 to the full stack on Python source, where names used far back come again: loss on
# identifiers by the distance of their last use. W=16, so that the four local layers together reach
# 4 * (16 - 1) = 60 of 512 tokens.
#   python ablate.py config/ablate_pysource.py --jobs=2
base = 'config/code_vanilla.py'
identifiers = True
eval_windows = 500         # a fifth of the held-out packages

seeds = '1,2,3,4'          # fixed before the first run
rows = {
    'vanilla GPT-2': {},
    '+ RoPE': dict(pos_embedding='rope'),
    '+ qk_norm': dict(qk_norm=True),
    # the strongest baseline with full memory. Without it a loss tells whether a row has learned to
    # copy names in so few steps (an induction head), not what its memory costs.
    '+ key offset': dict(key_offset=True),
    '+ MQA': dict(n_kv_head=1),
    '+ window': dict(layer_pattern='LLG', window_size=16),
    '+ KV shared by 2': dict(kv_share='AAB'),
    '+ global KV tied': dict(share_global_kv=True),
    '+ wider heads and MLP': dict(head_dim=40, mlp_hidden='match'),
    '+ int8 KV': dict(kv_dtype='int8'),
}
_FULL = '+ wider heads and MLP'
_NOPE = dict(rope_fraction_global=0.0)
side_rows = {
    'local layers only': (_FULL, dict(
        layer_pattern='LL', kv_share='AA', share_global_kv=False, key_offset=False)),
    'no key offset': (_FULL, dict(key_offset=False)),
    # K and V of one tensor do not go with a key offset
    'K = V on global layers, NoPE': ('no key offset', dict(kv_tied='global', **_NOPE)),
    'NoPE on global layers': (_FULL, _NOPE),
    'attention sinks': (_FULL, dict(attn_sink=True)),
    'output gate': (_FULL, dict(attn_gate=True, dtype='float32')),
    'int4 KV': (_FULL, dict(kv_dtype='int4')),
}
# to choose the learning rate of all rows, before the other seeds are run
for _row in ('+ key offset', _FULL):
    for _lr in (2e-2, 4e-2):
        side_rows[f"{_row.lstrip('+ ')} at learning rate {_lr:g}"] = (
            _row, dict(learning_rate=_lr, min_lr=_lr / 10, seeds='1'))
baseline = '+ key offset'
contexts = '512,4096'
batch_sizes = '1,16'
