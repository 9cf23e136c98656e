"""A ladder for the tests of ladders."""
import pytest

from lab.ablation.ladder import read_ladder

SMALL = '''
base = 'config/train_recall.py'
n_layer = 3
n_embd = 32
n_head = 4
block_size = 64
recall_task = 'distances=7,20'
'''
CONFIG = SMALL + '''
rows = {
    'vanilla GPT-2': {},
    '+ RoPE': dict(pos_embedding='rope'),
    '+ MQA': dict(n_kv_head=1),
    '+ windows': dict(layer_pattern='LLG', window_size=8),
    '+ wider MLP': dict(mlp_hidden='match'),
    '+ int8 KV': dict(kv_dtype='int8'),
    '+ int8 in training': dict(kv_quant_train='int8'),
}
side_rows = {
    'shared': ('+ windows', dict(kv_share='AAB')),
    'tied later': ('+ windows', dict(at_inference=dict(kv_share='AAB'))),
}
'''


@pytest.fixture
def ladder_of(tmp_path):
    """`ladder_of(text, *flags)` reads a ladder; its results are in the folder of the test."""
    def read(text=CONFIG, *flags):
        path = tmp_path / 'ablate_mine.py'
        path.write_text(text)
        return read_ladder([str(path), f'--folder={tmp_path}', *flags], echo=False)[1]
    return read
