"""bench.py --mode=kernels: on a machine without a GPU as far as the interpreter goes, where its times mean nothing."""
import json

import pytest
import torch

import bench
from attention.kernels import INTERPRETING, wanted
from benchmarks import kernels
from config.errors import UserError

SHAPE = ['--mode=kernels', '--n_head=4', '--n_kv_head=1', '--n_embd=64', '--window_size=16', '--contexts=20,40',
         '--batch_sizes=2', '--dtype=float32', '--json=True']


@pytest.mark.skipif(not INTERPRETING, reason='interpreted where there is no GPU')
def test_every_cell_and_its_error(capsys, tmp_path):
    pytest.importorskip('triton')
    with wanted(True):
        bench.main([*SHAPE, '--device=cpu', f'--save={tmp_path}/kernels.json'])
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert document == json.loads((tmp_path / 'kernels.json').read_text())
    for cell in document['decode']:
        assert set(cell['sides']) == {'kernel, int8', 'kernel, int8 products', 'kernel', 'SDPA', 'SDPA, heads folded'}
        for name, side in cell['sides'].items():
            assert side['error'] < (2e-2 if name == 'kernel, int8 products' else 1e-5)
            per_key = 16 + 2 if 'int8' in name else 64
            assert side['bytes'] == 2 * 2 * cell['context'] * per_key
            assert side['bytes_per_second'] == pytest.approx(side['bytes'] / side['ms']['median'] * 1000)
    assert [set(cell['sides']) for cell in document['training']] == [{'sdpa, full', 'sdpa, W=16'}] * 2
    assert set(document['write'][0]['sides']) == {'kernel', 'plain torch'}
    assert 'share of a copy' in out and 'QK-norm, RoPE, int8 and write' in out


def test_one_way_that_fails_is_told_and_the_others_go_on():
    def fails():
        raise RuntimeError('out of resource: shared memory\nand more')
    found = kernels.attempt(fails, torch.device('cpu'), None, None, {})
    assert found == {'failed': 'RuntimeError: out of resource: shared memory'}


def test_a_machine_without_the_kernels():
    with wanted(False), pytest.raises(UserError, match='needs CUDA and the triton package'):
        bench.main([*SHAPE, '--device=cpu'])
