"""Matmuls on AMX tiles, which tests/helpers/tiles.h stands in for on other processors."""
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest
import torch

import extension
from engine import native
from tests.engine import test_linear, test_weights
from tests.engine.test_native import test_other_weights_stay_close as check_other_weights

STAND_IN = Path(__file__).parents[1] / 'helpers' / 'tiles.h'
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    native.library() is None or 'avx512_bf16' not in extension._processor(),
    reason='needs a compiler and AVX-512 BF16')]


def opened(fault: int):
    """The extension with tiles, whose products of bytes are wrong if `fault` is not 0."""
    version = zlib.crc32(STAND_IN.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, 'FLAGS', (*extension.FLAGS, '-include', str(STAND_IN),
                                           f'-DVERSION={version}', f'-DFAULT={fault}'))
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


@pytest.mark.parametrize('weights, bound', [('bfloat16', 0.03), ('int8', 0.05)])
def test_a_step(tiles, weights, bound):
    check_other_weights(weights, bound)


def test_tiles_that_are_wrong_are_not_used(monkeypatch, capsys):
    found = opened(fault=1)
    assert 'wrong here and not used' in capsys.readouterr().err
    monkeypatch.setattr(native, '_library', lambda: found)
    test_weights.test_matmuls_equal_exact_sums_of_integers(True, 16, 16, 64)


def test_a_compiler_takes_the_real_ones(tmp_path):
    command = [shutil.which('g++') or 'c++', *extension.FLAGS, '-march=sapphirerapids', '-S',
               f'-I{extension.HERE}', str(native.SOURCE), '-o', str(tmp_path / 'decode.s')]
    subprocess.run(command, check=True)
    assembly = (tmp_path / 'decode.s').read_text()
    assert all(name in assembly for name in ('tdpbsud', 'tdpbf16ps', 'ldtilecfg', 'tilerelease'))
