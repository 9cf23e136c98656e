"""Resuming with other settings than a checkpoint was trained with: shorter, longer, RoPE, other windows."""
import shutil

import pytest
import torch

from config.gpt_config import GPTConfig
from model import GPT
from tests.programs.support import ALPHABET, FULL_STACK, VANILLA, load, run_train

WPE = 'transformer.wpe.weight'


@pytest.fixture
def resume(tmp_path, trained):
    """Copy a trained folder, go on from its iteration 10 (without a step, so that the weights stay) with other settings."""
    def go(name='vanilla', config=VANILLA, **settings):
        shutil.copytree(trained[name], tmp_path / 'out')
        settings = dict(max_iters=10, learning_rate=0.0, min_lr=0.0, weight_decay=0.0) | settings
        run = run_train(tmp_path / 'out', config, init_from='resume', **settings)
        return load(trained[name] / 'ckpt.pt'), load(run.path), run
    return go


def model_of(checkpoint):
    model = GPT(GPTConfig(**checkpoint['model_args'])).eval()
    model.load_state_dict(checkpoint['model'])
    return model


def moments(checkpoint):
    """Name of the parameter -> its first moment, by the order in which the optimizer holds them."""
    model = model_of(checkpoint)
    named = [(n, p) for n, p in model.named_parameters() if p.dim() >= 2] + [
        (n, p) for n, p in model.named_parameters() if p.dim() < 2]
    return {name: checkpoint['optimizer']['state'][i]['exp_avg'] for i, (name, _) in enumerate(named)}


def idx(T):
    return torch.randint(len(ALPHABET), (3, T), generator=torch.Generator().manual_seed(1))


def test_a_shorter_context_is_cropped_with_its_moments(resume):
    before, after, _ = resume(block_size=8)
    assert after['model_args'] == before['model_args'] | {'block_size': 8}
    assert torch.equal(model_of(after)(idx(8))[0], model_of(before)(idx(8))[0])
    assert after['optimizer']['state'][1]['exp_avg'].shape == after['model'][WPE].shape == (8, 16)
    assert after['config']['block_size'] == 8


def test_training_goes_on_after_cropping(resume):
    _, after, run = resume(block_size=8, max_iters=14, learning_rate=1e-2)
    assert [row['iter'] for row in run.rows][-1] == 14


@pytest.mark.parametrize('settings', [{}, dict(block_size=32)], ids=['same length', 'longer'])
def test_learned_positions_give_way_to_rope(resume, settings):
    before, after, _ = resume(pos_embedding='rope', rope_theta=500.0, **settings)
    args = before['model_args'] | {'pos_embedding': 'rope', 'rope_theta': 500.0} | settings
    assert after['model_args'] == args and WPE not in after['model']
    assert all(torch.equal(before['model'][name], x) for name, x in after['model'].items())
    old, new = moments(before), moments(after)
    assert old.keys() - new.keys() == {WPE}
    # one more step with a learning rate of 0 went over them: they still point where they did
    for name, x in new.items():
        assert torch.nn.functional.cosine_similarity(old[name].flatten(), x.flatten(), dim=0) > 0.5, name


def test_training_goes_on_with_rope(resume):
    _, after, run = resume(pos_embedding='rope', max_iters=40, lr_decay_iters=40, learning_rate=1e-2)
    evaluated = {row['iter']: row['val_loss'] for row in run.rows if 'val_loss' in row}
    assert evaluated[40] < evaluated[10]


def test_a_longer_context_with_rope_is_the_same_model(resume):
    before, after, _ = resume('full', FULL_STACK, block_size=32)
    assert after['model_args'] == before['model_args'] | {'block_size': 32}
    assert torch.equal(model_of(after)(idx(32))[0], model_of(before)(idx(32))[0])


@pytest.mark.parametrize('settings', [dict(window_size=8), dict(rope_theta=50.0), dict(rope_theta_global=70.0),
                                      dict(gelu='tanh'), dict(kv_quant_train='int8')], ids=str)
def test_settings_without_weights_are_taken_and_said(resume, capsys, settings):
    before, after, _ = resume('full', FULL_STACK, **settings)
    assert after['model_args'] == before['model_args'] | settings
    (name, value), = settings.items()
    assert f'{name} = {value!r} (trained with ' in capsys.readouterr().out
    assert not torch.equal(model_of(after).train()(idx(16))[0], model_of(before).train()(idx(16))[0])


@pytest.mark.parametrize('settings, saved', [(dict(pos_embedding='rope'), True), ({}, False)], ids=['changed', 'as it was'])
def test_a_changed_model_is_judged_anew(tmp_path, trained, settings, saved):
    """Its loss is no more to be compared with the best of before."""
    checkpoint = load(trained['vanilla'] / 'ckpt.pt')
    torch.save(checkpoint | {'best_val_loss': torch.tensor(0.01)}, tmp_path / 'ckpt.pt')
    run = run_train(tmp_path, init_from='resume', max_iters=10, always_save_checkpoint=False, **settings)
    assert (load(run.path)['best_val_loss'] > 1) == saved


def test_keys_that_were_not_given_come_from_the_checkpoint(tmp_path, trained, capsys):
    shutil.copytree(trained['full'], tmp_path / 'out')
    given = dict(dataset='tiny', device='cpu', compile=False, batch_size=2, gradient_accumulation_steps=1, eval_iters=1)
    run = run_train(tmp_path / 'out', given, init_from='resume', max_iters=10, eval_interval=1)
    assert load(run.path)['model_args'] == load(trained['full'] / 'ckpt.pt')['model_args']
    assert load(run.path)['config']['block_size'] == 16 and 'as in the checkpoint' not in capsys.readouterr().out
