"""Losses over fixed windows, by position and by window: the forward pass and the cache give the
same."""
import math

import numpy as np
import pytest
import torch

from data.tokenfiles import open_split
from data.tokenizer import CharTokenizer
from training.evaluate import (
    bits_per_byte, forward, judge, n_bytes, spread_windows, through_cache, with_rounding)
from engine.weights.quantize import quantize_weights
from model import GPT, GPTConfig
from tests.helpers.datasets import write_dataset

TINY = dict(block_size=16, vocab_size=13, n_layer=3, n_head=2, n_embd=32, n_kv_head=1,
            layer_pattern='LLG', kv_share='AAB', window_size=5, pos_embedding='rope', qk_norm=True)


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    model = GPT(GPTConfig(**TINY)).eval()
    # larger than initial weights, so that the context matters
    for p in model.parameters():
        p.data.mul_(4)
    return model, torch.randint(13, (5, 17))


@pytest.mark.parametrize('length, n, wanted',
                         [(101, 3, [0, 40, 80]), (101, 50, [0, 20, 40, 60, 80]), (21, 3, [0]),
                          (101, 0, [0, 20, 40, 60, 80]), (110, 0, [0, 22, 44, 66, 89])])
def test_windows_are_spread_and_do_not_overlap(length, n, wanted, tmp_path):
    write_dataset(tmp_path / 'd', {'train': np.arange(2), 'val': np.arange(length)},
                  {'vocab_size': length})
    windows = spread_windows(open_split(tmp_path / 'd', 'val'), 20, n)
    assert windows.shape[1] == 21 and windows[:, 0].tolist() == wanted


def test_through_the_cache_is_the_forward_pass(tiny):
    model, windows = tiny
    a = judge(forward(model), windows, 2)
    for first, chunk in ((4, 3), (16, 1), (30, 5)):
        b = judge(through_cache(model, 'float32', first, chunk), windows, 5)
        assert torch.allclose(a.mean(1), b.mean(1), atol=1e-5)
        assert torch.allclose(a.mean(0), b.mean(0), atol=1e-5)
    with torch.no_grad():
        loss = model(windows[:, :-1], windows[:, 1:])[1].item()
        assert a.mean().item() == pytest.approx(loss, abs=1e-5)
        logits = model(windows[:, :-1], all_logits=True)[0].double().log_softmax(-1)
    expected = -logits.gather(2, windows[:, 1:, None])[..., 0].mean(0)
    assert torch.allclose(a.mean(0), expected.double(), atol=1e-9)


@pytest.mark.parametrize('weight_dtype', ['auto', 'int8'])
def test_the_int8_cache_is_the_forward_pass_that_rounds(tiny, weight_dtype):
    model, windows = tiny
    quantize_weights(model, weight_dtype)
    a = judge(forward(with_rounding(model, True)), windows)
    b = judge(through_cache(model, 'int8', 4, 3), windows)
    assert torch.allclose(a.mean(1), b.mean(1), atol=1e-5)
    assert not torch.allclose(a.mean(1), judge(forward(model), windows).mean(1), atol=1e-5)


def test_bytes_are_those_of_the_targets_in_utf8():
    tokenizer = CharTokenizer({'a': 0, 'é': 1, '€': 2}, {0: 'a', 1: 'é', 2: '€'})
    assert n_bytes(tokenizer, torch.tensor([[2, 0, 1], [0, 2, 2]])) == (1 + 2) + (3 + 3)
    assert bits_per_byte(math.log(2), 10, 20) == pytest.approx(0.5)
