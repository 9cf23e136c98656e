"""train.py with attention_z_loss."""
import math

import pytest
import torch

import train
from config.errors import UserError
from tests.programs.support import FULL_STACK, losses, run_train


@pytest.mark.parametrize('dtype, n', [('float32', 1), ('float32', 4), ('float16', 2)])
def test_it_is_scaled_as_the_loss_is(tmp_path, monkeypatch, dtype, n):
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


def test_the_first_loss_is_the_cross_entropy_and_later_ones_differ(tmp_path):
    run_train(tmp_path / 'plain', FULL_STACK)
    run_train(tmp_path / 'with', FULL_STACK, attention_z_loss=1.0)
    plain, found = losses(tmp_path / 'plain'), losses(tmp_path / 'with')
    assert plain[0] == found[0] and plain[1:] != found[1:]


@pytest.mark.parametrize('value', [-0.1, math.nan])
def test_wrong_coefficients_are_refused(tmp_path, value):
    with pytest.raises(UserError, match='attention_z_loss'):
        run_train(tmp_path / 'out', attention_z_loss=value)
