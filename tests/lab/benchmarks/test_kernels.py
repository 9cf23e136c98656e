"""bench.py --mode=kernels in Triton's interpreter, where times are meaningless."""
import json

import pytest

import bench
from attention.backends import INTERPRETING, triton_enabled
from tests.programs.support import flags

SHAPE = dict(mode='kernels', n_head=4, n_kv_head=1, n_embd=64, contexts='20,40', batch_sizes=2,
             dtype='float32', device='cpu')


@pytest.mark.skipif(not INTERPRETING, reason='interpreted where there is no GPU')
def test_every_cell_and_its_error(capsys, tmp_path):
    pytest.importorskip('triton')
    with triton_enabled(True):
        bench.main(flags(SHAPE | dict(save=tmp_path / 'kernels.json')))
    out = capsys.readouterr().out
    document = json.loads((tmp_path / 'kernels.json').read_text())
    for cell in document['decode']:
        assert set(cell['sides']) == {'kernel, int8', 'kernel', 'SDPA', 'SDPA, heads folded'}
        for name, side in cell['sides'].items():
            assert side['error'] < 1e-5
            per_key = 16 + 2 if 'int8' in name else 64
            assert side['bytes'] == 2 * 2 * cell['context'] * per_key
            speed = side['bytes'] / side['ms']['median'] * 1000
            assert side['bytes_per_second'] == pytest.approx(speed)
    assert set(document['write'][0]['sides']) == {'kernel', 'plain torch'}
    assert 'share of a copy' in out and 'QK-norm, RoPE, int8 and write' in out
