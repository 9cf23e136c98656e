"""A trained model converted to a smaller KV cache, and training continued from it."""
import pytest

from config.errors import UserError
from interop import convert
from tests.programs.support import VANILLA, flags, metrics, run_train
from training.checkpoint import load_checkpoint

CHANGES = dict(n_kv_head=1, layer_pattern='LG', window_size=4)


def test_training_goes_on_from_a_converted_checkpoint(trained, tmp_path, capsys):
    new = tmp_path / 'new'
    convert.main([str(trained['vanilla']), str(new), *flags(CHANGES)])
    assert 'n_kv_head = 1' in capsys.readouterr().out
    with pytest.raises(UserError, match='is there already'):
        convert.main([str(trained['vanilla']), str(new), *flags(CHANGES)])
    saved = load_checkpoint(new / 'ckpt.pt')
    assert saved['iter_num'] == 0 and saved['model_args']['n_kv_head'] == 1
    assert saved['model']['transformer.h.0.attn.c_attn.weight'].shape == (16 + 2 * 8, 16)

    run_train(new, VANILLA, **CHANGES, init_from='resume', max_iters=10, lr_decay_iters=10)
    rows = metrics(new)
    assert [row['iter'] for row in rows] == list(range(11))
    scratch = run_train(tmp_path / 'scratch', VANILLA, **CHANGES, max_iters=10,
                        lr_decay_iters=10).rows
    assert rows[0]['loss'] < scratch[0]['loss'] - 0.1  # it does not start from scratch
    assert load_checkpoint(new / 'ckpt.pt')['model_args']['window_size'] == 4


def test_what_a_config_asks_for_in_vain_is_named(trained, tmp_path, capsys):
    path = tmp_path / 'asked.py'
    path.write_text('n_kv_head = 1\nqk_norm = True\nn_embd = 32\ndropout = 0.25\nn_layer = 2')
    convert.main([str(trained['vanilla']), str(tmp_path / 'new'), str(path)])
    out = capsys.readouterr().out
    assert 'qk_norm = False (not True)' in out and 'n_embd = 16 (not 32)' in out
    args = load_checkpoint(tmp_path / 'new' / 'ckpt.pt')['model_args']
    assert (args['n_kv_head'], args['dropout']) == (1, 0.25) and 'n_layer = 2 (not' not in out
