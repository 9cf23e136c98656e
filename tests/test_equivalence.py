"""Every path computes what model.py's full forward computes: chunks, ragged rows, pages, the
engine, captured and C++ steps, training's kernels, recomputation, the export. The checks are those
of `lab.conform`; the configs are few, and each two mechanisms occur together in one of them."""
import dataclasses
import functools

import pytest

from lab.conform import CHECKS, conform
from tests.helpers.mechanisms import pairs

pytestmark = pytest.mark.filterwarnings('ignore:layer_pattern')
SLOW = 'resuming', 'gradients', 'cache, float32'
# what a path refuses, by the beginning of its reason
REFUSED = {'training kernels': 'kv_quant_train', 'recomputation': 'kv_quant_train'}
few = functools.partial(pairs, block_size=44, windows=(1, 4, 9), kv_quant_train='',
                        n_embd=32, head_dim=16, mlp_hidden=48)  # multiples of 8 for the C++ step
CONFIGS = few()
ROUNDED = [dataclasses.replace(config, kv_quant_train='int8') for config in CONFIGS[:3]]
# the export refuses both patterns, and windows of one token
EXPORTED = few(window_pattern='', kv_head_pattern='', windows=(4, 9))


@pytest.mark.parametrize('path, config', [
    pytest.param(path, config, id=f'{path}-{k}') for path in CHECKS if path not in SLOW
    for k, config in enumerate((EXPORTED if path == 'export' else CONFIGS) + ROUNDED)
    if not (path == 'export' and config in ROUNDED)])
def test_a_path_computes_what_the_full_forward_computes(path, config):
    why = conform(config, [path])[path]
    refused = config.kv_quant_train and why.startswith(f'({REFUSED.get(path)}')
    assert refused or not why, config
