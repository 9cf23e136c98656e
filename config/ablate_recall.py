# The rows of config/ablate_shakespeare.py on a task that needs memory: recall a token inside the
# window, beyond it, and beyond the reach of all local layers combined, 10 * (4 - 1) = 30 positions.
#   python ablate.py config/ablate_recall.py --jobs=2
import config.ablate_shakespeare as _text

base = 'config/train_recall.py'
rows = {**_text.rows, '+ window': dict(layer_pattern='LLLLLG', window_size=4)}
baseline = '+ qk_norm'
seeds = '1,2,3'
side_seeds = '1'
side_rows = {name: _text.side_rows[name] for name in (
    'global first: GLLLLL/ABBCCC', 'global first, untied', 'untied', 'tied at inference only')}
# control: cannot solve the task
side_rows['local layers only'] = ('+ KV shared by 2/3',
                                  dict(layer_pattern='LLLLL', kv_share='AABBB'))

speed = False
contexts = '96'
