"""train.py with other optimizers, batches, roundings, losses and plans of memory."""
import re
import sys

import pytest
import torch

import train
import training.loss
from config.errors import UserError
from tests.programs.support import BOTH, FULL_STACK, VANILLA, load, losses, run_sample, run_train
from training import batches

WIDE = dict(VANILLA, n_embd=64)  # only tensors of at least 4096 numbers are kept in 8 bits
# the time of a prediction grows with the number of layers
LESS = dict(FULL_STACK, n_layer=4, layer_pattern='LG', kv_share='AB')


@pytest.mark.parametrize('trained_with, wanted', [
    (dict(optimizer='adamw'), dict(optimizer='muon')),
    (dict(data_order='shuffled'), dict(data_order='sequential')),
    (dict(data_order='shuffled'), dict(data_order='random'))], ids=str)
def test_the_state_of_another_kind_is_refused(tmp_path, trained_with, wanted):
    run_train(tmp_path, max_iters=2, eval_interval=2, **trained_with)
    (name, value), = trained_with.items()
    with pytest.raises(UserError, match=f"trained with {name}='{value}'.*go on with "
                                        f'--{name}={value}'):
        run_train(tmp_path, max_iters=4, init_from='resume', **wanted)


# -- optimizers ------------------------------------------------------------------------------------

def test_another_optimizer_without_a_step_and_muon_with_a_shorter_context(tmp_path):
    """A checkpoint without a step is like one written by interop.convert."""
    config = dict(VANILLA, eval_interval=2)
    run_train(tmp_path, config, max_iters=2)
    saved = load(tmp_path / 'ckpt.pt')
    torch.save(saved | {'optimizer': {**saved['optimizer'], 'state': {}}}, tmp_path / 'ckpt.pt')
    config |= dict(init_from='resume', optimizer='muon')
    run_train(tmp_path, config, max_iters=4)
    before = load(tmp_path / 'ckpt.pt')['optimizer']['state']
    assert 'momentum_buffer' in before[0]
    run_train(tmp_path, config, max_iters=6, block_size=8)
    run_train(tmp_path, config, max_iters=8, block_size=8, pos_embedding='rope')
    after = load(tmp_path / 'ckpt.pt')
    assert 'transformer.wpe.weight' not in after['model'] and after['model_args']['block_size'] == 8
    assert len(after['optimizer']['state']) == len(before) - 1


@pytest.mark.slow
def test_what_was_trained_with_8_bits_is_sampled_without_torchao(tmp_path, monkeypatch, capsys):
    run_train(tmp_path, WIDE, max_iters=2, eval_interval=2, optimizer='adamw8bit')
    states = load(tmp_path / 'ckpt.pt')['optimizer']['state']
    assert any('8bit' in str(state) for state in states.values())
    for name in [name for name in sys.modules if name.partition('.')[0] == 'torchao']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'torchao', None)
    assert 'KV cache' in run_sample(capsys, out_dir=tmp_path)


# -- the order of batches --------------------------------------------------------------------------

def seen(tmp_path, monkeypatch, name, **settings):
    """The batches that a run trains on."""
    rows, plain = [], batches.TokenBatches.next

    def recorded(self):
        rows.append(plain(self))
        return rows[-1]
    with monkeypatch.context() as patch:
        patch.setattr(batches.TokenBatches, 'next', recorded)
        run_train(tmp_path / name, VANILLA, max_iters=3, **settings)
    return torch.stack([x for x, _ in rows[:4]])  # the prefetching thread may have made more


def test_with_a_data_seed_batches_do_not_depend_on_the_weights(tmp_path, monkeypatch):
    """Without one, the weights are drawn first, as in nanoGPT."""
    given, other, larger, none, again, none_larger = (
        seen(tmp_path, monkeypatch, str(k), n_layer=n_layer, **settings)
        for k, (n_layer, settings) in enumerate([
            (1, dict(data_seed=5, seed=0)), (1, dict(data_seed=6)), (3, dict(data_seed=5, seed=1)),
            (1, {}), (1, {}), (3, {})]))
    assert torch.equal(given, larger) and not torch.equal(given, other)
    assert torch.equal(none, again) and not torch.equal(none, none_larger)


# -- int8 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize('settings, said, near', [
    (dict(int8_training=True), 'training 28 matrices of blocks in int8', 0.05),
    (dict(int8_forward=True), 'rounding the weights and inputs of the blocks to int8', 0.1)],
    ids=str)
def test_training_in_int8_is_near_and_leaves_a_plain_checkpoint(
        tmp_path, capsys, settings, said, near):
    """The validation loss of int8_forward is the rounded model's."""
    plain = run_train(tmp_path / 'plain', FULL_STACK)
    run = run_train(tmp_path / 'rounded', FULL_STACK, **settings)
    assert said in capsys.readouterr().out
    expected, found = ([row['loss'] for row in each.rows] for each in (plain, run))
    assert found != expected and found == pytest.approx(expected, abs=near)
    types = [{name: x.dtype for name, x in load(each.path)['model'].items()}
             for each in (plain, run)]
    assert types[0] == types[1]
    evaluated = []
    for more in (settings, {}):
        run_train(run.path.parent, FULL_STACK, init_from='resume', eval_only=True, **more)
        evaluated.append(re.findall('^step .*', capsys.readouterr().out, re.M))
    assert len(evaluated[0]) == len(evaluated[1]) == 1
    assert (evaluated[0] != evaluated[1]) == ('int8_forward' in settings)


# -- the attention z-loss --------------------------------------------------------------------------

@pytest.mark.parametrize('dtype, n', [('float32', 4), ('float16', 2)])
def test_the_z_loss_is_scaled_as_the_loss_is_and_not_logged(tmp_path, monkeypatch, dtype, n):
    """By the number of micro-batches, and by the loss scale, which falls in the first iterations
    here."""
    plain, scaler, scales = train.Run.step, torch.amp.GradScaler, []

    def step(run):
        before = run.scaler.get_scale()
        loss = plain(run)
        scales.append((run.z_loss_scale.item(), before / n))
        return loss
    settings = dict(dtype=dtype, max_iters=12, gradient_accumulation_steps=n)
    monkeypatch.setattr(torch.amp, 'GradScaler', lambda device, **more: scaler(
        device, init_scale=2.0 ** 28, **more))
    run_train(tmp_path / 'plain', FULL_STACK, **settings)
    monkeypatch.setattr(train.Run, 'step', step)
    run_train(tmp_path / 'with', FULL_STACK, attention_z_loss=0.1, **settings)
    assert all(ours == wanted for ours, wanted in scales) and len(scales) == 13
    assert (len(set(scales)) > 3) == (dtype == 'float16')
    without, found = losses(tmp_path / 'plain'), losses(tmp_path / 'with')
    assert without[0] == found[0] and without[1:] != found[1:]


# -- half precision --------------------------------------------------------------------------------

@pytest.mark.parametrize('config, dtype', [(FULL_STACK, 'bfloat16'), (VANILLA, 'float16')])
def test_half_precision_stays_near_float32_and_keeps_its_state_there(tmp_path, monkeypatch,
                                                                     config, dtype):
    monkeypatch.setattr(training.loss, 'CHUNK_BYTES', {'cpu': 4 * 12 * 16})  # several chunks
    settings = dict(config, max_iters=2, eval_interval=2, gradient_accumulation_steps=2)
    scale = 65536.0 if dtype == 'float16' else None
    exact = run_train(tmp_path / 'a', settings, dtype='float32').rows
    half = run_train(tmp_path / 'b', settings, dtype=dtype).rows
    for a, b in zip(exact, half):
        assert a['loss'] == pytest.approx(b['loss'], abs=0.01) and a['loss'] != b['loss']
        assert b['skipped'] == 0
        # of the unscaled gradients
        assert a['grad_norm'] == pytest.approx(b['grad_norm'], rel=0.05)
        assert b.get('loss_scale') == scale and 'loss_scale' not in a
    saved = load(tmp_path / 'b' / 'ckpt.pt')
    assert {x.dtype for x in saved['model'].values()} == {torch.float32}
    moments = [x for state in saved['optimizer']['state'].values() for x in state.values()]
    assert moments and {x.dtype for x in moments} == {torch.float32}
    assert saved['scaler'].get('scale') == scale


# -- memory ----------------------------------------------------------------------------------------

@BOTH
def test_the_report_changes_no_loss(tmp_path, capsys, config):
    config = dict(config, dropout=0.1, max_iters=3, eval_interval=2, n_layer=3)
    run_train(tmp_path / 'without', config)
    out = capsys.readouterr().out
    assert 'predicted' not in out and out.count('memory: ') == 1
    run_train(tmp_path / 'with', config, memory_report=True)
    out = capsys.readouterr().out
    assert losses(tmp_path / 'with') == losses(tmp_path / 'without')
    for name in ('parameters', 'gradients', 'optimizer state', 'activations', 'logits and loss',
                 'peak'):
        row = re.search(rf'^{name} +([\d.]+ \w+) +([\d.]+ \w+) *$', out, re.M)
        predicted, measured = row.groups()
        assert predicted == measured
    for policy in ('none', 'selective', 'mlp', 'block', 'sqrt'):
        assert re.search(f'^{policy} +.*%', out, re.M)
