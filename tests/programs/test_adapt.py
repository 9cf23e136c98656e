"""Resuming with settings that differ from the checkpoint's: context length, RoPE, windows.

The weights and moments of every parameter are checked in tests/training/test_adapt.py.
"""
import shutil

import pytest
import torch

from config.gpt_config import GPTConfig
from model import GPT
from tests.programs.support import ALPHABET, FULL_STACK, VANILLA, load, run_train


@pytest.fixture
def resume(tmp_path, trained):
    """Resume a copy of a trained folder with different settings and a learning rate of 0."""
    def go(name='vanilla', config=VANILLA, **settings):
        shutil.copytree(trained[name], tmp_path / 'out')
        still = dict(max_iters=10, learning_rate=0.0, min_lr=0.0, weight_decay=0.0)
        run = run_train(tmp_path / 'out', config, init_from='resume', **still | settings)
        return load(trained[name] / 'ckpt.pt'), load(run.path), run
    return go


def logits(checkpoint, T, train=False):
    model = GPT(GPTConfig(**checkpoint['model_args'])).train(train)
    model.load_state_dict(checkpoint['model'])
    idx = torch.randint(len(ALPHABET), (3, T), generator=torch.Generator().manual_seed(1))
    return model(idx)[0]


def test_a_longer_context_with_rope_is_the_same_model(resume):
    before, after, _ = resume('full', FULL_STACK, block_size=32)
    assert after['model_args'] == before['model_args'] | {'block_size': 32}
    assert torch.equal(logits(after, 32), logits(before, 32))


def test_training_goes_on_with_rope(resume):
    _, _, run = resume(pos_embedding='rope', max_iters=40, lr_decay_iters=40, learning_rate=1e-2)
    evaluated = {row['iter']: row['val_loss'] for row in run.rows if 'val_loss' in row}
    assert evaluated[40] < evaluated[10]


@pytest.mark.parametrize('name, value', [
    ('window_size', 8), ('rope_theta', 50.0), ('rope_theta_global', 70.0), ('gelu', 'tanh'),
    ('kv_quant_train', 'int8'), ('rope_fraction_global', 0.5), ('rope_fraction_global', 0.0),
    ('act_clamp', 0.01)])
def test_settings_without_weights_can_be_changed(resume, capsys, name, value):
    before, after, _ = resume('full', FULL_STACK, **{name: value})
    assert after['model_args'] == before['model_args'] | {name: value}
    assert f'{name} = {value!r} (trained with ' in capsys.readouterr().out
    assert not torch.equal(logits(after, 16, train=True), logits(before, 16, train=True))


@pytest.mark.parametrize('settings, saved', [(dict(pos_embedding='rope'), True), ({}, False)],
                         ids=['changed', 'unchanged'])
def test_a_changed_model_has_no_best_loss_yet(tmp_path, trained, settings, saved):
    checkpoint = load(trained['vanilla'] / 'ckpt.pt')
    torch.save(checkpoint | {'best_val_loss': torch.tensor(0.01)}, tmp_path / 'ckpt.pt')
    run = run_train(tmp_path, init_from='resume', max_iters=10, always_save_checkpoint=False,
                    **settings)
    assert (load(run.path)['best_val_loss'] > 1) == saved


def test_keys_that_were_not_given_come_from_the_checkpoint(tmp_path, trained, capsys):
    shutil.copytree(trained['full'], tmp_path / 'out')
    given = dict(dataset='tiny', device='cpu', compile=False, batch_size=2,
                 gradient_accumulation_steps=1, eval_iters=1)
    run = run_train(tmp_path / 'out', given, init_from='resume', max_iters=10, eval_interval=1)
    before, after = load(trained['full'] / 'ckpt.pt'), load(run.path)
    assert after['model_args'] == before['model_args'] and after['config']['block_size'] == 16
    assert 'as in the checkpoint' not in capsys.readouterr().out
