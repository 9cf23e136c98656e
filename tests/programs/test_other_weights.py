"""Training that goes on from a checkpoint with other settings (context length, RoPE, windows), from
one converted to a smaller KV cache, and from GPT-2's weights.

The weights and moments of every parameter are checked in tests/training/test_adapt.py.
"""
import shutil

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from common.errors import UserError
from common.gpt_config import GPTConfig
from interop import convert
from model import GPT
from tests.programs.support import (
    ALPHABET, FULL_STACK, VANILLA, flags, load, metrics, run_sample, run_train)
from training.checkpoint.file import load_checkpoint


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


# -- converted to a smaller KV cache

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


# -- GPT-2 weights from a folder: `--init_from=FOLDER`

GIVEN = {name: value for name, value in VANILLA.items()
         if name not in ('n_layer', 'n_head', 'n_embd')}


@pytest.fixture(scope='module')
def hub_model(tmp_path_factory):
    """A tiny random GPT-2 saved by Hugging Face, with weights so large that all parts matter."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=16,
                                       vocab_size=len(ALPHABET), initializer_range=0.5,
                                       bos_token_id=0, eos_token_id=0)).eval()
    folder = tmp_path_factory.mktemp('gpt2')
    model.save_pretrained(folder)
    return folder, model


def args_of(run):
    return load(run.path)['model_args']


def test_finetuning_gpt2(tmp_path, hub_model, capsys):
    folder, _ = hub_model
    run = run_train(tmp_path, GIVEN, init_from=folder, max_iters=20)
    assert args_of(run) == dict(n_layer=2, n_head=2, n_embd=8, block_size=16, bias=True,
                                vocab_size=len(ALPHABET), dropout=0.0, gelu='tanh')
    evaluated = [row['val_loss'] for row in run.rows if 'val_loss' in row]
    assert evaluated[-1] < evaluated[0] - 0.1
    assert f'Initializing from OpenAI GPT-2 weights: {folder}' in capsys.readouterr().out


def test_settings_change_gpt2(tmp_path, hub_model):
    """With exact GELU, the checkpoint is one for nanoGPT."""
    settings = dict(block_size=8, dropout=0.1)
    run = run_train(tmp_path, GIVEN, init_from=hub_model[0], max_iters=2, eval_interval=2,
                    gelu='exact', **settings)
    assert args_of(run) == dict(n_layer=2, n_head=2, n_embd=8, bias=True,
                                vocab_size=len(ALPHABET)) | settings
    assert len(load(run.path)['model']['transformer.wpe.weight']) == 8
    resumed = run_train(tmp_path, GIVEN, init_from='resume', max_iters=4, eval_interval=2,
                        block_size=8)
    assert [row['iter'] for row in resumed.rows] == list(range(5))


def test_sampling_from_gpt2(hub_model, capsys):
    folder, theirs = hub_model
    out = run_sample(capsys, init_from=folder, dataset='tiny', temperature=0, max_new_tokens=8,
                     report=False)
    ids = theirs.generate(torch.tensor([[ALPHABET.index(c) for c in 'ab']]), max_new_tokens=8,
                          do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()
    assert ''.join(ALPHABET[i] for i in ids) + '\n---------------\n' in out
