# The rows of config/ablate_prices.py on a task that needs memory: recall a token inside the window,
# beyond it, and beyond the reach of all local layers combined, 10 * (4 - 1) = 30 positions.
#   python ablate.py config/ablate_recall.py --jobs=2
import config.ablate_prices as _text

base = 'config/train_recall.py'
seeds = '1,2,3'
rows = {**_text.rows, '+ window': dict(layer_pattern='LLLLLG', window_size=4)}
baseline = '+ qk_norm'
_FIRST = 'global first: GLLLLL/ABBCCC'
_UNTIED = dict(share_global_kv=False, seeds='1')
side_rows = {
    _FIRST: _text.side_rows[_FIRST],
    'global first, untied': (_FIRST, _UNTIED),
    'untied': ('+ wider heads and MLP', _UNTIED),
    'tied at inference only': _text.side_rows['tied at inference only'],
    # control: cannot solve the task
    'local layers only': ('+ KV shared by 2/3', dict(
        layer_pattern='LLLLL', kv_share='AABBB', seeds='1')),
}

contexts = '96'
