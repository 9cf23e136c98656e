"""FLOPs: by hand, from masks, counted by torch, and by nanoGPT's formula."""
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attention.masks import dense_mask
from kv.counts import total_keys
from kv.plan import Layer
from model import GPT, GPTConfig
from tests.helpers.mechanisms import CHANGES, STACK
from tests.helpers.models import FULL_STACK
from training.step.flops import achieved, estimate_mfu, flops_per_token, peak_tflops

VANILLA = dict(block_size=8, vocab_size=11, n_layer=2, n_head=2, n_embd=4)


def test_attention_of_windows_by_hand():
    config = GPTConfig(block_size=4, vocab_size=7, n_layer=4, n_head=4, head_dim=3, n_embd=5,
                       n_kv_head=2, layer_pattern='LLGG', kv_share='AABB', window_size=2)
    keys = 2 * (1 + 2 + 2 + 2) / 4 + 2 * (1 + 2 + 3 + 4) / 4
    assert flops_per_token(GPT(config))[1] == 12 * 4 * 3 * keys


@pytest.mark.parametrize('T', [1, 5, 33])
@pytest.mark.parametrize('window', [0, 1, 5, 40])
def test_keys_are_those_of_the_mask(T, window):
    layer = Layer(0, 'local' if window else 'global', window, 0, True)
    assert total_keys(layer, T) == dense_mask(T, T, window).sum().item()


SHAPES = {'vanilla': VANILLA, 'full stack': FULL_STACK,
          **{name: STACK | changes for name, changes in CHANGES.items()}}


@pytest.mark.parametrize('settings', SHAPES.values(), ids=SHAPES)
def test_matrix_products_are_what_torch_counts(settings):
    model, idx = GPT(GPTConfig(**settings)), torch.zeros(3, 8, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(idx, idx)[1].backward()
    counted = counter.get_flop_counts()['Global']
    linear = sum(n for op, n in counted.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert linear == flops_per_token(model)[0] * idx.numel()


def test_rates_of_whole_sequences_nanogpts_and_ours():
    model = GPT(GPTConfig(**VANILLA))
    N = sum(p.numel() for p in model.parameters()) - 8 * 4
    rate = (6 * N + 12 * 2 * 2 * 2 * 8) * 8 * 3 / 0.5
    assert estimate_mfu(model, 3, 0.5) == pytest.approx(rate / 312e12)  # of an A100
    flops = sum(flops_per_token(model)) * 8 * 5
    assert achieved(model, 5, 0.25) == pytest.approx(flops / 0.25 / 1e12)


@pytest.mark.parametrize('name, dtype, tflops', [
    ('Tesla V100-SXM2-16GB', 'float16', 125.0), ('Tesla V100-SXM2-16GB', 'bfloat16', None),
    ('Tesla V100-PCIE-32GB', 'float32', 14.0), ('NVIDIA A100-SXM4-80GB', 'bfloat16', 312.0),
    ('NVIDIA A100-SXM4-40GB MIG 3g.20gb', 'bfloat16', None),
    ('NVIDIA L4', 'bfloat16', 121.0), ('NVIDIA L40S', 'bfloat16', 362.0),
    ('NVIDIA GeForce RTX 3090 Ti', 'bfloat16', None), ('Some GPU', 'float32', None)])
def test_peaks_of_devices_by_their_names(name, dtype, tflops, monkeypatch):
    monkeypatch.setattr(torch, 'get_float32_matmul_precision', lambda: 'high')
    assert peak_tflops(name, getattr(torch, dtype)) == tflops
    assert peak_tflops('NVIDIA A100 80GB PCIe', torch.float32) == 156.0
    monkeypatch.setattr(torch, 'get_float32_matmul_precision', lambda: 'highest')  # no TF32
    assert peak_tflops('NVIDIA A100 80GB PCIe', torch.float32) == 19.5
    assert peak_tflops('', torch.float32) is None
