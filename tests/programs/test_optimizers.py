"""train.py with each optimizer: interrupted runs end as whole ones, and another's state is refused."""
import re
import sys

import pytest
import torch

import sample
from config.errors import UserError
from tests.programs.support import FULL_STACK, VANILLA, load, losses, run_train

EIGHT_BIT = pytest.param('adamw8bit', marks=pytest.mark.slow)  # torch.compile
WIDE = dict(VANILLA, n_embd=64)  # 8 bits are for tensors of 4096 numbers and more


@pytest.mark.parametrize('name', ['muon', EIGHT_BIT])
def test_an_interrupted_run_ends_as_a_whole_one(tmp_path, name, capsys):
    torch._dynamo.reset()  # what tests before have compiled counts against its limit
    config = dict(FULL_STACK, n_embd=64, optimizer=name, lr_schedule='wsd')
    run_train(tmp_path / 'whole', config, max_iters=8, eval_interval=4)
    run_train(tmp_path / 'parts', config, max_iters=4, eval_interval=4)
    run_train(tmp_path / 'parts', config, max_iters=8, eval_interval=4, init_from='resume')
    assert losses(tmp_path / 'whole') == losses(tmp_path / 'parts')
    whole, parts = (load(tmp_path / out / 'ckpt.pt')['model'] for out in ('whole', 'parts'))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    assert re.search(r'memory: .*optimizer', capsys.readouterr().out)


def test_another_optimizers_state_is_refused(tmp_path):
    run_train(tmp_path, max_iters=2, eval_interval=2)
    with pytest.raises(UserError, match=r"trained with optimizer='adamw'.*go on with --optimizer=adamw"):
        run_train(tmp_path, max_iters=4, init_from='resume', optimizer='muon')


def test_a_checkpoint_without_a_step_goes_on_with_any(tmp_path):
    """As one that interop.convert made."""
    run_train(tmp_path, max_iters=2, eval_interval=2)
    saved = load(tmp_path / 'ckpt.pt')
    torch.save(saved | {'optimizer': {**saved['optimizer'], 'state': {}}}, tmp_path / 'ckpt.pt')
    run_train(tmp_path, max_iters=4, eval_interval=2, init_from='resume', optimizer='muon')
    assert 'momentum_buffer' in load(tmp_path / 'ckpt.pt')['optimizer']['state'][0]


def test_muons_state_follows_a_shorter_context(tmp_path):
    run_train(tmp_path, max_iters=2, eval_interval=2, optimizer='muon')
    before = load(tmp_path / 'ckpt.pt')['optimizer']
    run_train(tmp_path, max_iters=4, eval_interval=2, init_from='resume', optimizer='muon', block_size=8)
    run_train(tmp_path, max_iters=6, eval_interval=2, init_from='resume', optimizer='muon', block_size=8,
              pos_embedding='rope')
    after = load(tmp_path / 'ckpt.pt')
    assert 'transformer.wpe.weight' not in after['model'] and after['model_args']['block_size'] == 8
    assert len(after['optimizer']['state']) == len(before['state']) - 1


def test_a_run_goes_on_with_its_optimizer_on_the_host(tmp_path, capsys):
    config = dict(FULL_STACK, n_embd=64)
    run_train(tmp_path / 'whole', config, max_iters=8, eval_interval=4)
    run_train(tmp_path / 'parts', config, max_iters=4, eval_interval=4)
    capsys.readouterr()
    run_train(tmp_path / 'parts', config, max_iters=8, eval_interval=4, init_from='resume', offload_optimizer=True)
    assert losses(tmp_path / 'whole') == losses(tmp_path / 'parts')
    out = capsys.readouterr().out
    assert 'using AdamW on the host' in out and re.search(r'optimizer 0.* \(and .* on the host\)', out)
    for name in ('whole', 'parts'):  # and back
        run_train(tmp_path / name, config, max_iters=12, init_from='resume')
    assert losses(tmp_path / 'whole') == losses(tmp_path / 'parts')


@pytest.mark.slow
def test_what_was_trained_with_8_bits_is_sampled_without_torchao(tmp_path, monkeypatch, capsys):
    run_train(tmp_path, WIDE, max_iters=2, eval_interval=2, optimizer='adamw8bit')
    assert any('8bit' in str(state) for state in load(tmp_path / 'ckpt.pt')['optimizer']['state'].values())
    for name in [name for name in sys.modules if name.partition('.')[0] == 'torchao']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'torchao', None)
    sample.main([f'--out_dir={tmp_path}', '--device=cpu', '--num_samples=1', '--max_new_tokens=5', '--start=a'])
    assert 'KV cache' in capsys.readouterr().out


@pytest.mark.parametrize('settings, named', [
    (dict(muon_momentum=1.0), 'muon_momentum=1.0'), (dict(optimizer='sgd'), "optimizer='sgd'"),
    (dict(optimizer='muon', offload_optimizer=True), "goes with optimizer='adamw'"),
    (dict(lr_schedule='linear'), "lr_schedule='linear'"), (dict(cooldown_iters=-1), 'cooldown_iters=-1'),
    (dict(lr_schedule='wsd', cooldown_iters=19), 'cooldown_iters=19 are more than lr_decay_iters=20')])
def test_wrong_settings(tmp_path, settings, named):
    with pytest.raises(UserError) as caught:
        run_train(tmp_path, **settings)
    assert named in str(caught.value)
