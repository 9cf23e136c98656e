"""train.py with each optimizer: interrupted runs, and the state of a different optimizer."""
import re
import sys

import pytest
import torch

from config.errors import UserError
from tests.programs.support import (
    FULL_STACK,
    VANILLA,
    assert_same_weights,
    load,
    losses,
    run_sample,
    run_train,
)

EIGHT_BIT = pytest.param('adamw8bit', marks=pytest.mark.slow)  # torch.compile
WIDE = dict(VANILLA, n_embd=64)  # only tensors of at least 4096 numbers are kept in 8 bits


@pytest.mark.parametrize('name', ['muon', EIGHT_BIT])
def test_an_interrupted_run_ends_as_a_whole_one(tmp_path, name):
    torch._dynamo.reset()  # compilations of earlier tests count against its limit
    config = dict(FULL_STACK, n_embd=64, optimizer=name, lr_schedule='wsd', eval_interval=4)
    run_train(tmp_path / 'whole', config, max_iters=8)
    run_train(tmp_path / 'parts', config, max_iters=4)
    run_train(tmp_path / 'parts', config, max_iters=8, init_from='resume')
    assert losses(tmp_path / 'whole') == losses(tmp_path / 'parts')
    assert_same_weights(*(load(tmp_path / out / 'ckpt.pt')['model'] for out in ('whole', 'parts')))


def test_another_optimizers_state_is_refused(tmp_path):
    run_train(tmp_path, max_iters=2, eval_interval=2)
    message = "trained with optimizer='adamw'.*go on with --optimizer=adamw"
    with pytest.raises(UserError, match=message):
        run_train(tmp_path, max_iters=4, init_from='resume', optimizer='muon')


def test_a_checkpoint_without_a_step_goes_on_with_any(tmp_path):
    """Like one written by interop.convert."""
    run_train(tmp_path, max_iters=2, eval_interval=2)
    saved = load(tmp_path / 'ckpt.pt')
    torch.save(saved | {'optimizer': {**saved['optimizer'], 'state': {}}}, tmp_path / 'ckpt.pt')
    run_train(tmp_path, max_iters=4, eval_interval=2, init_from='resume', optimizer='muon')
    assert 'momentum_buffer' in load(tmp_path / 'ckpt.pt')['optimizer']['state'][0]


def test_muons_state_follows_a_shorter_context(tmp_path):
    config = dict(VANILLA, optimizer='muon', eval_interval=2)
    run_train(tmp_path, config, max_iters=2)
    before = load(tmp_path / 'ckpt.pt')['optimizer']
    config |= dict(init_from='resume', block_size=8)
    run_train(tmp_path, config, max_iters=4)
    run_train(tmp_path, config, max_iters=6, pos_embedding='rope')
    after = load(tmp_path / 'ckpt.pt')
    assert 'transformer.wpe.weight' not in after['model'] and after['model_args']['block_size'] == 8
    assert len(after['optimizer']['state']) == len(before['state']) - 1


def test_a_run_goes_on_with_its_optimizer_on_the_host(tmp_path, capsys):
    config = dict(FULL_STACK, n_embd=64, eval_interval=4)
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    run_train(whole, config, max_iters=8)
    run_train(parts, config, max_iters=4)
    capsys.readouterr()
    run_train(parts, config, max_iters=8, init_from='resume', offload_optimizer=True)
    out = capsys.readouterr().out
    assert 'using AdamW on the host' in out
    assert re.search(r'optimizer 0.* \(and .* on the host\)', out)
    for folder in (whole, parts):  # and back
        run_train(folder, config, max_iters=12, init_from='resume')
    assert losses(whole) == losses(parts)


@pytest.mark.slow
def test_what_was_trained_with_8_bits_is_sampled_without_torchao(tmp_path, monkeypatch, capsys):
    run_train(tmp_path, WIDE, max_iters=2, eval_interval=2, optimizer='adamw8bit')
    states = load(tmp_path / 'ckpt.pt')['optimizer']['state']
    assert any('8bit' in str(state) for state in states.values())
    for name in [name for name in sys.modules if name.partition('.')[0] == 'torchao']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'torchao', None)
    assert 'KV cache' in run_sample(capsys, out_dir=tmp_path)


@pytest.mark.parametrize('settings, named', [
    (dict(muon_momentum=1.0), 'muon_momentum=1.0'),
    (dict(optimizer='sgd'), "optimizer='sgd'"),
    (dict(optimizer='muon', offload_optimizer=True), "goes with optimizer='adamw'"),
    (dict(lr_schedule='linear'), "lr_schedule='linear'"),
    (dict(cooldown_iters=-1), 'cooldown_iters=-1'),
    (dict(lr_schedule='wsd', cooldown_iters=19),
     'cooldown_iters=19 are more than lr_decay_iters=20')])
def test_wrong_settings(tmp_path, settings, named):
    with pytest.raises(UserError) as caught:
        run_train(tmp_path, **settings)
    assert named in str(caught.value)
