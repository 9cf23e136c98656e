"""Matmuls and attention on AMX tiles, which tests/helpers/tiles.h stands in for on other
processors."""
import copy
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

import extension
from common.gpt_config import GPTConfig
from engine import native
from engine.steps.native import native_decode
from engine.weights import linear
from engine.weights.quantized import Int8Linear
from lab.scripts import tiles as script
from tests.engine import test_chunks, test_linear, test_weights
from tests.engine.test_native import WIDE
from tests.engine.test_native import test_other_weights_stay_close as check_other_weights
from tests.helpers.models import random_model, tokens

SANITIZE = ('-fsanitize=address,undefined', '-fno-sanitize=alignment', '-fno-sanitize-recover',
            '-O1')
STAND_IN = Path(__file__).parents[1] / 'helpers' / 'tiles.h'
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    native.library() is None or (sys.platform, os.uname().machine) != ('linux', 'x86_64'),
    reason='needs a compiler, Linux and x86-64')]


def opened(fault: int):
    """The extension with tiles. Products are wrong of bytes (fault=1) or of bfloat16 (2)."""
    version = zlib.crc32(STAND_IN.read_bytes())
    sanitize = SANITIZE if os.environ.get('LD_PRELOAD', '').endswith('libasan.so') else ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, 'FLAGS', (*extension.FLAGS, '-include', str(STAND_IN),
                                           f'-DVERSION={version}', f'-DFAULT={fault}', *sanitize))
        return extension.opened(native.SOURCE, native._checked)


@pytest.fixture
def tiles(monkeypatch):
    found = opened(fault=0)
    assert found.nanokv_tiles(1)
    monkeypatch.setattr(native, '_library', lambda: found)


@pytest.mark.parametrize('n_in, n_out', [(64, 16), (1024, 65), (48, 33)])
def test_products_are_exact(tiles, n_in, n_out):
    test_linear.test_any_number_of_rows(n_in, n_out, torch.bfloat16)
    for n_rows in (7, 8, 16, 17, 33, 83):
        test_weights.test_matmuls_equal_exact_sums_of_integers(True, n_rows, n_out, n_in)


@pytest.mark.parametrize('n_out', [16, 96, 65])
def test_a_row_is_the_same_in_any_batch(tiles, n_out):
    """To the bit, also alone: its activations are always rounded."""
    layer, x = nn.Linear(128, n_out, bias=False), torch.randn(70, 128)
    described = test_linear.described(layer.weight.detach().bfloat16())
    for matmul in (lambda x: linear.by_extension(described, x), Int8Linear(layer)):
        whole = matmul(x)
        for n in (1, 2, 16, 17, 33, 64):
            assert torch.equal(matmul(x[:n]), whole[:n]), n


@pytest.mark.parametrize('kv_dtype', ['float32', 'bfloat16', 'int8', 'int4'])
def test_chunks_of_prompts(tiles, kv_dtype):
    test_chunks.test_it_equals_dense_attention(12, 1, 64, kv_dtype)
    test_chunks.test_it_equals_dense_attention(6, 3, 32, kv_dtype)


@pytest.mark.parametrize('weights, bound', [('bfloat16', 0.03), ('int8', 0.05)])
def test_a_step(tiles, weights, bound):
    check_other_weights(weights, bound)


@pytest.mark.parametrize('mlp_hidden, bias, gelu', [(96, True, 'tanh'), (160, False, 'relu2')])
@torch.inference_mode()
def test_a_step_with_the_mlp_on_tiles(tiles, mlp_hidden, bias, gelu):
    """The MLP's hidden activations stay as tiles have them, if they are a multiple of 32."""
    config = GPTConfig(**WIDE | dict(mlp_hidden=mlp_hidden, bias=bias, gelu=gelu, vocab_size=32))
    model = random_model(config, torch.float32).bfloat16()
    rounding = copy.deepcopy(model).float()
    for layer in rounding.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda _, args: (args[0].bfloat16().float(),))
    plain, other = (m.new_cache(3, 64, 'float32') for m in (rounding, model))
    decode, idx = native_decode(model, other), tokens(3, 61)
    for a, b in ((0, 40), (40, 41), (41, 61)):
        new = idx[:, a:b]
        expected = rounding(new, cache=plain)[0][:, -1]
        logits = decode.extend(new.tolist(), [0, 1, 2], [True] * 3)
        gaps = (logits - expected).abs() / expected.std()
        assert gaps.max() < 0.03  # a number between two others may be rounded to either


@pytest.mark.parametrize('fault', [1, 2])
def test_tiles_that_are_wrong_are_not_used(monkeypatch, capsys, fault):
    found = opened(fault)
    assert 'wrong here and not used' in capsys.readouterr().err
    monkeypatch.setattr(native, '_library', lambda: found)
    test_weights.test_matmuls_equal_exact_sums_of_integers(True, 16, 16, 64)


def test_matmuls_are_timed_with_and_without_them(tiles, monkeypatch):
    monkeypatch.setattr(script, 'ROUNDS', 1)
    rows = list(script.matmuls(32, 64))
    assert [name for name, *_ in rows][:2] == ['bfloat16, 1 x 64 by 32', 'int8, 1 x 64 by 32']
    assert len(rows) == 16 and all(float(n) > 0 for _, *numbers in rows for n in numbers)
    assert native.library().nanokv_tiles(1)


def test_a_compiler_takes_the_real_ones(tmp_path):
    command = [shutil.which('g++') or 'c++', *extension.FLAGS, '-march=sapphirerapids', '-S',
               f'-I{extension.HERE}', str(native.SOURCE), '-o', str(tmp_path / 'decode.s')]
    subprocess.run(command, check=True)
    assembly = (tmp_path / 'decode.s').read_text()
    assert all(name in assembly for name in ('tdpbsud', 'tdpbf16ps', 'ldtilecfg', 'tilerelease'))


def test_no_access_is_out_of_bounds():
    """By the sanitizers for addresses and undefined behaviour, in a process that loads theirs
    first."""
    found = subprocess.run(['g++', '-print-file-name=libasan.so'], capture_output=True, text=True)
    if not Path(found.stdout.strip()).is_absolute():
        pytest.skip('no libasan here')
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', __file__, '-k',
         'products or batch or chunks or a_step'],
        env=os.environ | {'LD_PRELOAD': found.stdout.strip(), 'ASAN_OPTIONS': 'detect_leaks=0'},
        capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert ' passed' in done.stdout
