"""train.py with other optimizers, batches, roundings, losses and plans of memory."""
import re
import sys

import pytest
import torch

import train
import training.loss
from config.errors import UserError
from tests.programs.support import (
    BOTH,
    FULL_STACK,
    HARD,
    TINY,
    VANILLA,
    load,
    losses,
    run_sample,
    run_train,
)
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
    run_train(parts, config, max_iters=10, init_from='resume', offload_optimizer=True)
    run_train(whole, config, max_iters=10, init_from='resume')
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


def test_runs_of_a_data_seed_see_the_same_batches_whatever_their_weights(tmp_path, monkeypatch):
    settings = [(5, 1), (5, 3), (6, 1)]
    small, large, other = (
        seen(tmp_path, monkeypatch, str(k), data_seed=seed, n_layer=n_layer, seed=k)
        for k, (seed, n_layer) in enumerate(settings))
    assert torch.equal(small, large) and not torch.equal(small, other)


def test_without_one_the_weights_are_drawn_first_as_in_nanogpt(tmp_path, monkeypatch):
    small, again, large = (
        seen(tmp_path, monkeypatch, str(k), n_layer=n) for k, n in enumerate((1, 1, 3)))
    assert torch.equal(small, again) and not torch.equal(small, large)


@pytest.mark.parametrize('order', ['random', 'sequential', 'shuffled'])
def test_a_run_goes_on_in_its_order_however_many_batches_were_ahead(tmp_path, order):
    config = dict(VANILLA, data_order=order, **HARD)
    run_train(tmp_path / 'whole', config, max_iters=9, data_prefetch=0)
    run_train(tmp_path / 'parts', config, max_iters=4, data_prefetch=7)
    run_train(tmp_path / 'parts', config, max_iters=9, data_prefetch=2, init_from='resume')
    assert losses(tmp_path / 'whole') == losses(tmp_path / 'parts')


# -- int8 ------------------------------------------------------------------------------------------

@pytest.mark.parametrize('policy', ['none', 'block'])
def test_training_in_int8_learns(tmp_path, policy, capsys):
    config = dict(FULL_STACK, recompute=policy)
    plain = run_train(tmp_path / 'plain', config)
    run = run_train(tmp_path / 'int8', config, int8_training=True)
    assert 'training 28 matrices of blocks in int8' in capsys.readouterr().out
    assert losses(tmp_path / 'plain') != losses(tmp_path / 'int8')
    expected = [row['loss'] for row in plain.rows]
    assert [row['loss'] for row in run.rows] == pytest.approx(expected, abs=0.05)


def test_int8_forward_trains_a_plain_checkpoint(tmp_path, capsys):
    """Its losses are near those without; its validation loss is the rounded model's."""
    plain = run_train(tmp_path / 'plain', FULL_STACK)
    run = run_train(tmp_path / 'rounded', FULL_STACK, int8_forward=True)
    assert 'rounding the weights and inputs of the blocks to int8' in capsys.readouterr().out
    expected = [row['loss'] for row in plain.rows]
    found = [row['loss'] for row in run.rows]
    assert found != expected and found == pytest.approx(expected, abs=0.1)
    saved, other = load(run.path), load(plain.path)
    assert {name: x.dtype for name, x in saved['model'].items()} == {
        name: x.dtype for name, x in other['model'].items()}
    evaluated = []
    for rounds in (True, False):
        run_train(run.path.parent, FULL_STACK, init_from='resume', eval_only=True,
                  int8_forward=rounds)
        evaluated.append(re.findall('^step .*', capsys.readouterr().out, re.M))
    assert evaluated[0] != evaluated[1] and len(evaluated[0]) == len(evaluated[1]) == 1


# -- the attention z-loss --------------------------------------------------------------------------

@pytest.mark.parametrize('dtype, n', [('float32', 1), ('float32', 4), ('float16', 2)])
def test_the_z_loss_is_scaled_as_the_loss_is(tmp_path, monkeypatch, dtype, n):
    """By the number of micro-batches, and by the loss scale, which falls in the first iterations
    here."""
    plain, scaler, scales = train.Run.step, torch.amp.GradScaler, []

    def step(run):
        before = run.scaler.get_scale()
        loss = plain(run)
        scales.append((run.z_loss_scale.item(), before / n))
        return loss
    monkeypatch.setattr(train.Run, 'step', step)
    monkeypatch.setattr(torch.amp, 'GradScaler', lambda device, **more: scaler(
        device, init_scale=2.0 ** 28, **more))
    run_train(tmp_path, FULL_STACK, attention_z_loss=0.1, dtype=dtype, max_iters=12,
              gradient_accumulation_steps=n)
    assert all(ours == wanted for ours, wanted in scales) and len(scales) == 13
    assert (len(set(scales)) > 3) == (dtype == 'float16')


def test_the_first_logged_loss_is_the_cross_entropy_and_later_ones_differ(tmp_path):
    run_train(tmp_path / 'plain', FULL_STACK)
    run_train(tmp_path / 'with', FULL_STACK, attention_z_loss=1.0)
    plain, found = losses(tmp_path / 'plain'), losses(tmp_path / 'with')
    assert plain[0] == found[0] and plain[1:] != found[1:]


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


@pytest.mark.parametrize('budget, policy', [('400KB', 'selective'), ('300KB', 'block')])
def test_auto_takes_the_fastest_that_fits(tmp_path, capsys, budget, policy):
    config = dict(LESS, max_iters=2, eval_interval=2, eval_iters=1)
    run_train(tmp_path / 'auto', config, recompute='auto', memory_budget=budget)
    message = (rf"^recompute='auto' is '{policy}': predicted peak [\d.]+ [kM]B, "
               rf'budget memory_budget={budget}$')
    assert re.search(message, capsys.readouterr().out, re.M)
    run_train(tmp_path / 'given', config, recompute=policy)
    assert losses(tmp_path / 'auto') == losses(tmp_path / 'given')


def test_auto_without_a_budget_takes_what_is_free(tmp_path, capsys):
    run_train(tmp_path, TINY, max_iters=1, eval_interval=1, recompute='auto')
    message = r"^recompute='auto' is 'none': .* budget .*B, 90% of what is free$"
    assert re.search(message, capsys.readouterr().out, re.M)
