"""The kernels compiled for an H100 with the arguments of a decode step, which needs Triton but no
GPU, and which resources they use."""
import json

import pytest

from tests.helpers.without_gpu import run_alone

pytest.importorskip('triton')

PROGRAM = '''
import json, sys
import torch
from attention.kernels import decode, qkv
from attention.kernels.decode import Tuning
from engine.steps import fused_linear
from kv.slots import KVStore
from tests.helpers.ahead_of_time import CompilesOnly, resources

made = []
for module, name in ((decode, '_split'), (decode, '_join'), (qkv, '_write'),
                     (fused_linear, '_linear')):
    setattr(module, name, CompilesOnly(getattr(module, name), made))
B, H, HKV, dtype = 4, 12, 1, torch.bfloat16


def compiled(layout, kv_dtype, D=64, S=1024, page=64):
    """The kernels of one decode step. S: keys that a row has room for, or the window."""
    made.clear()
    n, capacity = (64, page) if layout == 'paged' else (B, S)
    store = KVStore(n, HKV, capacity, D, getattr(torch, kv_dtype), dtype, torch.device('cpu'))
    stored = torch.zeros_like(store.tensors[1]), *store.tensors[1:]  # K as on a GPU
    q, numbers = torch.zeros(B, H, 1, D, dtype=dtype), torch.zeros(B, 1, dtype=torch.int64)

    def attend(q, n_splits, **how):
        decode.stored_attention(q, *stored, **how, tuning=Tuning(n_splits=n_splits))
    if layout in ('contiguous', 'ring'):
        attend(q, 4, kv_lens=numbers[:, 0], window=S if layout == 'ring' else 0)
    elif layout == 'paged':
        attend(q, 1, kv_lens=numbers[:, 0], table=torch.zeros(B, S // page, dtype=torch.int32))
    elif layout == 'chunk':
        attend(q.expand(B, H, 5, D), 2, window=7)
    elif layout == 'linear':
        for rows in (1, 16, 32):
            fused_linear.fused_linear(torch.zeros(rows, 768, dtype=dtype),
                                      torch.nn.Linear(768, 2304, dtype=dtype), None, 'tanh')
    else:
        norm, table = torch.nn.RMSNorm(D, eps=1e-6, dtype=dtype), torch.zeros(B, 1, 1, D)
        qkv.write_qkv(torch.zeros(B, 1, H + 2 * HKV, D, dtype=dtype), H, norm, norm,
                      (table, table), stored, numbers, numbers)
        qkv.write_qkv(torch.zeros(B, 1, H, D, dtype=dtype), H, norm, None, (table, table))
    return [described(kernel) for kernel in made]


def described(kernel):
    return {'kernel': kernel.metadata.name, 'tensor cores': 'mma' in kernel.asm['ptx'],
            **resources(kernel)}


print(json.dumps([compiled(**case) for case in json.loads(sys.argv[1])]))
'''


def compiled(cases, tmp_path, **environment):
    """Compile the kernels of each case, [{'kernel': ..., ...}, ...], in one process."""
    return run_alone(PROGRAM, json.dumps(cases), TRITON_CACHE_DIR=str(tmp_path),
                     TRITON_DEFAULT_FP_FUSION='1', **environment)


def test_inductor_may_pass_floats_in_double_precision(tmp_path):
    cases = [dict(layout='contiguous', kv_dtype='int8'), dict(layout='write', kv_dtype='int8')]
    assert len(compiled(cases, tmp_path, FLOAT='fp64')) == 2


@pytest.mark.slow
def test_everything_compiles(tmp_path):
    cases = [dict(layout=layout, kv_dtype=kv_dtype, D=D) for layout, kv_dtype, D in [
        ('contiguous', 'float32', 64), ('contiguous', 'int8', 16), ('chunk', 'int8', 64),
        ('write', 'int8', 64), ('write', 'bfloat16', 80), ('linear', 'int8', 64)]]
    cases += [dict(layout='paged', kv_dtype='int8', page=page) for page in (4, 64, 192)]
    cases += [dict(layout='ring', kv_dtype='bfloat16', S=250), dict(
        layout='contiguous', kv_dtype='int8', D=256)]
    for case, kernels in zip(cases, compiled(cases, tmp_path), strict=True):
        names = [kernel['kernel'] for kernel in kernels]
        if case['layout'] == 'write':
            assert names == ['_write'] * 2
        elif case['layout'] != 'linear':
            assert names == ['_split'] + ['_join'] * (case['layout'] != 'paged')
            assert kernels[0]['tensor cores'] == (case['kv_dtype'] != 'float32')
        assert all(kernel['shared'] <= 227 * 1024 for kernel in kernels), case
        # two registers if a block has several pages
        assert all(kernel['spilled'] <= 8 for kernel in kernels), case
