"""A trained model converted to a smaller KV cache, and training continued from it."""
import pytest
import torch

from config.errors import UserError
from interop import convert
from tests.programs.support import VANILLA, flags, metrics, run_train
from training.checkpoint import load_checkpoint

CHANGES = dict(n_kv_head=1, layer_pattern='LG', window_size=4)


def test_training_goes_on_from_a_converted_checkpoint(trained, tmp_path, capsys):
    new = tmp_path / 'new'
    convert.main([str(trained['vanilla']), str(new), *flags(CHANGES)])
    assert 'n_kv_head = 1' in capsys.readouterr().out
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


def test_a_checkpoint_that_is_there_stays(trained, tmp_path):
    torch.save({}, tmp_path / 'ckpt.pt')
    before = (tmp_path / 'ckpt.pt').read_bytes()
    with pytest.raises(UserError, match='is there already'):
        convert.main([str(trained['vanilla']), str(tmp_path), '--n_kv_head=1'])
    assert (tmp_path / 'ckpt.pt').read_bytes() == before
