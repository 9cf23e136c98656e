"""train.py with other optimizers, batches, roundings, losses and plans of memory."""
import re

import pytest
import torch

import training.step.loss
from common.errors import UserError
from tests.programs.support import FULL_STACK, VANILLA, load, losses, run_train
from training.loop import batches


@pytest.mark.parametrize('trained_with, wanted', [
    (dict(optimizer='adamw'), dict(optimizer='muon')),
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
    given, larger, none, none_larger = (
        seen(tmp_path, monkeypatch, str(k), **settings) for k, settings in enumerate([
            dict(data_seed=5), dict(data_seed=5, seed=1, n_layer=3), {}, dict(n_layer=3)]))
    assert torch.equal(given, larger) and not torch.equal(given, none)
    assert not torch.equal(none, none_larger)


# -- half precision --------------------------------------------------------------------------------

@pytest.mark.parametrize('config, dtype', [(FULL_STACK, 'bfloat16'), (VANILLA, 'float16')])
def test_half_precision_stays_near_float32_and_keeps_its_state_there(tmp_path, monkeypatch,
                                                                     config, dtype):
    monkeypatch.setattr(training.step.loss, 'CHUNK_BYTES', {'cpu': 4 * 12 * 16})  # several chunks
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

def test_the_report_changes_no_loss(tmp_path, capsys):
    config = dict(FULL_STACK, dropout=0.1, max_iters=3, eval_interval=2, n_layer=3)
    run_train(tmp_path / 'without', config)
    out = capsys.readouterr().out
    assert 'predicted' not in out and out.count('memory: ') == 1
    run_train(tmp_path / 'with', config, memory_report=True)
    out = capsys.readouterr().out
    assert losses(tmp_path / 'with') == losses(tmp_path / 'without')
    for name in ('parameters', 'gradients', 'optimizer', 'activations', 'loss peak', 'peak'):
        row = re.search(rf'^{name} +([\d.]+ \w+) +([\d.]+ \w+) *$', out, re.M)
        predicted, measured = row.groups()
        assert predicted == measured
    for policy in ('none', 'selective', 'mlp', 'block', 'sqrt'):
        assert re.search(f'^{policy} +.*B', out, re.M)
