"""Resuming with settings that differ from the checkpoint's: context length, RoPE, windows.

The weights and moments of every parameter are checked in tests/training/test_adapt.py.
"""
import shutil

import pytest
import torch

from config.gpt_config import GPTConfig
from model import GPT
from tests.programs.support import ALPHABET, FULL_STACK, load, run_train


@pytest.fixture
def resume(tmp_path, trained):
    """Resume a copy of a trained folder with different settings and a learning rate of 0. Return
    the checkpoints before and after it."""
    def go(**settings):
        shutil.copytree(trained['full'], tmp_path / 'out')
        still = dict(max_iters=10, learning_rate=0.0, min_lr=0.0, weight_decay=0.0)
        run = run_train(tmp_path / 'out', FULL_STACK, init_from='resume', **still | settings)
        return load(trained['full'] / 'ckpt.pt'), load(run.path)
    return go


def logits(checkpoint, T):
    model = GPT(GPTConfig(**checkpoint['model_args']))  # rounds as in training
    model.load_state_dict(checkpoint['model'])
    idx = torch.randint(len(ALPHABET), (3, T), generator=torch.Generator().manual_seed(1))
    return model(idx)[0]


@pytest.mark.parametrize('name, value', [
    ('window_size', 8), ('rope_theta', 50.0), ('gelu', 'tanh'), ('kv_quant_train', 'int8'),
    ('block_size', 32)])
def test_settings_without_weights_can_be_changed(resume, capsys, name, value):
    before, after = resume(**{name: value})
    assert after['model_args'] == before['model_args'] | {name: value}
    assert f'{name} = {value!r} (trained with ' in capsys.readouterr().out
    same = torch.equal(logits(after, 16), logits(before, 16))
    assert same == (name == 'block_size')  # a longer context with RoPE is the same model


@pytest.mark.parametrize('settings, saved', [(dict(pos_embedding='rope'), True), ({}, False)],
                         ids=['changed', 'unchanged'])
def test_a_changed_model_has_no_best_loss_yet(tmp_path, trained, settings, saved):
    checkpoint = load(trained['vanilla'] / 'ckpt.pt')
    torch.save(checkpoint | {'best_val_loss': torch.tensor(0.01)}, tmp_path / 'ckpt.pt')
    run = run_train(tmp_path, init_from='resume', max_iters=10, always_save_checkpoint=False,
                    **settings)
    assert (load(run.path)['best_val_loss'] > 1) == saved
