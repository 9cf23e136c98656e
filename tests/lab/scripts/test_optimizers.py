"""lab/scripts/optimizers.py: what it says of an optimizer is what the optimizer holds."""
import pytest
import torch

from config.gpt_config import GPTConfig
from lab.scripts import optimizers
from model import GPT

SHAPE = dict(vocab_size=64, n_layer=2, n_head=2, n_embd=32)
MATRICES = 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128)  # of the blocks: Muon's


@pytest.mark.parametrize('name', ['adamw', 'muon', 'adamw, offload_optimizer'])
def test_state(monkeypatch, name):
    monkeypatch.setattr(optimizers, 'SHAPE', SHAPE)
    monkeypatch.setattr(optimizers, 'T', 16)
    found = optimizers.measure(name, torch.device('cpu'))
    n = sum(p.numel() for p in GPT(GPTConfig(block_size=16, **SHAPE)).parameters())
    held = {'adamw': 8 * n, 'muon': 8 * n - 4 * MATRICES, 'adamw, offload_optimizer': 0}[name]
    assert found['parameters_bytes'] == found['gradients_bytes'] == 4 * n
    assert held <= found['state_bytes'] <= held + 400  # and counters of steps
    assert (found['host_bytes'] >= 8 * n) == (name == 'adamw, offload_optimizer')
    assert found['update_seconds'] > 0 and found['peak_bytes'] > found['parameters_bytes']
