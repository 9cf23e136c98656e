"""The kernels compiled for an H100 with the arguments of a decode step, which needs Triton but no
GPU. The compiler's output shows what their inner loops do and which resources they use."""
import json

import pytest

from tests.helpers.without_gpu import run_alone

PROGRAM = '''
import json, sys
import torch
from attention.kernels import decode
from attention.kernels.decode import New, Tuning
from kv.slots import KVStore
from tests.helpers.ahead_of_time import (CompilesOnly, innermost_loop, loop_instructions,
                                         resources)

made = []
for name in ('_split', '_join'):
    setattr(decode, name, CompilesOnly(getattr(decode, name), made))
B, H, HKV, dtype = 4, 12, 1, torch.bfloat16


def compiled(layout, kv_dtype, D=64, S=1024, page=64, new='writes'):
    """The kernels of one decode step. S: keys that a row has room for, or the window. new: 'writes'
    or 'reads' K and V, with QK-norm and RoPE, in the same kernel; '' = they were written before."""
    made.clear()
    n, capacity = (64, page) if layout == 'paged' else (B, S)
    store = KVStore(n, HKV, capacity, D, getattr(torch, kv_dtype), dtype, torch.device('cpu'))
    stored = torch.zeros_like(store.tensors[1]), *store.tensors[1:]  # K as on a GPU
    q, numbers = torch.zeros(B, H, 1, D, dtype=dtype), torch.zeros(B, dtype=torch.int64)
    norm, rope = torch.nn.RMSNorm(D, eps=1e-6, dtype=dtype), (torch.zeros(B, 1, 1, D),) * 2
    if new == 'writes':
        q, new = torch.zeros(B, 1, H + 2 * HKV, D, dtype=dtype), New(
            H, norm, norm, rope, numbers, numbers, layout == 'ring')
    elif new:
        q, new = torch.zeros(B, 1, H, D, dtype=dtype), New(H, norm, None, rope)

    def attend(q, n_splits, **how):
        decode.stored_attention(q, *stored, **how, tuning=Tuning(n_splits=n_splits))
    if layout in ('contiguous', 'ring'):
        attend(q, 4, kv_lens=numbers, window=S if layout == 'ring' else 0, new=new or None)
    elif layout == 'paged':
        attend(q, 1, kv_lens=numbers, table=torch.zeros(B, S // page, dtype=torch.int32),
               new=new or None)
    else:
        attend(torch.zeros(B, H, 1, D, dtype=dtype).expand(B, H, 5, D), 2, window=7)
    return [described(kernel) for kernel in made]


def described(kernel):
    name = kernel.metadata.name
    loop = innermost_loop(kernel) if name == '_split' else {}
    return {'kernel': name, 'tensor cores': 'mma' in kernel.asm['ptx'], **resources(kernel), **loop,
            'warps': kernel.metadata.num_warps, 'instructions': loop_instructions(kernel)}


print(json.dumps([compiled(**case) for case in json.loads(sys.argv[1])]))
'''


def compiled(cases, tmp_path, **environment):
    """Compile the kernels of each case, [{'kernel': ..., ...}, ...], in one process."""
    return run_alone(PROGRAM, json.dumps(cases), TRITON_CACHE_DIR=str(tmp_path),
                     TRITON_DEFAULT_FP_FUSION='1', **environment)


def test_inductor_may_pass_floats_in_double_precision(tmp_path):
    cases = [dict(layout='contiguous', kv_dtype='int8', new=new) for new in ('writes', 'reads')]
    assert len(compiled(cases, tmp_path, FLOAT='fp64')) == 2


def test_instructions_for_a_key_of_int8(tmp_path):
    cases = [dict(layout='contiguous', keys=128), dict(layout='paged', page=64, keys=64),
             dict(layout='paged', page=128, keys=128)]
    keys = [case.pop('keys') for case in cases]  # of a block
    found = compiled([case | {'kv_dtype': 'int8'} for case in cases], tmp_path)
    for n, (split, *_) in zip(keys, found, strict=True):
        assert 5 < split['instructions'] * split['warps'] / n <= 20, split


@pytest.mark.slow
def test_the_loop_of_a_decode_step_waits_for_no_load(tmp_path):
    """Many head sizes; rows with any even number of keys; pages of several blocks, or smaller
    than one block."""
    cases = [dict(layout=layout, kv_dtype=kv_dtype, D=D) for layout in ('contiguous', 'paged')
             for D in (32, 48, 64, 80, 128, 256) for kv_dtype in ('int8', 'bfloat16')]
    cases += [dict(layout='ring', kv_dtype=kv_dtype) for kv_dtype in ('int8', 'bfloat16')]
    cases += [dict(layout='contiguous', kv_dtype='int8', S=S) for S in (1000, 1010)]
    cases += [dict(layout='ring', kv_dtype='int8', S=S) for S in (100, 250)]
    cases += [dict(layout='paged', kv_dtype='int8', page=page) for page in (16, 32, 128, 192)]
    for case, (split, *_) in zip(cases, compiled(cases, tmp_path), strict=True):
        assert split['kernel'] == '_split' and split['tensor cores'], case
        # K, V and the scales are copied asynchronously, page numbers loaded one block ahead
        assert split['copies'] == (4 if case['kv_dtype'] == 'int8' else 2), (case, split)
        assert split['loads'] == split['scalars'] == 0, (case, split)
        assert split['scalars_ahead'] == (case['layout'] == 'paged'), (case, split)
        # a multiprocessor (65,536 registers, 227 KB) must have room for three programs, or for two
        # if heads are larger than 64
        n = 3 if case.get('D', 64) <= 64 else 2
        # of the largest heads in int8, two numbers are not in registers
        most = 8 if case['kv_dtype'] == 'int8' and case.get('D') == 256 else 0
        assert split['spilled'] <= most and split['registers'] <= 65536 // (32 * split['warps'] * n)
        assert split['shared'] <= 227 * 1024 // n, (case, split)


@pytest.mark.slow
def test_everything_else_compiles(tmp_path):
    cases = [dict(layout=layout, kv_dtype=kv_dtype, D=D) for layout, kv_dtype, D in [
        ('contiguous', 'float32', 64), ('contiguous', 'int8', 16), ('chunk', 'int8', 64)]]
    cases += [dict(layout='paged', kv_dtype='int8', page=4)]
    cases += [dict(layout=layout, kv_dtype=kv_dtype, new=new) for layout in ('ring', 'paged')
              for kv_dtype in ('int8', 'bfloat16') for new in ('', 'reads')]
    for case, kernels in zip(cases, compiled(cases, tmp_path), strict=True):
        names = [kernel['kernel'] for kernel in kernels]
        assert names in (['_split', '_join'], ['_split']), case
        assert all(kernel['shared'] <= 227 * 1024 for kernel in kernels), case
        # two registers if a block has several pages
        assert all(kernel['spilled'] <= 8 for kernel in kernels), case


LAYERS = '''
import json, sys
import torch
from engine import native
from engine.steps import fused_linear, greedy
from engine.weights.quantized import Int8Linear
from lab.scripts.gpu_times import linear_cases
from tests.helpers.ahead_of_time import CompilesOnly, resources

native.library = lambda: None  # which would pack int8 weights
made = []
for module, name in ((fused_linear, '_linear'), (fused_linear, '_few_rows'),
                     (greedy, '_of_parts'), (greedy, '_of_rows')):
    setattr(module, name, CompilesOnly(getattr(module, name), made))
for rows, int8, shape in json.loads(sys.argv[1]):
    for case in linear_cases(rows, torch.device('cpu'), torch.bfloat16, shape, int8).values():
        fused_linear.fused_linear(*case)
for rows in (1, 256):
    greedy.most_likely(torch.zeros(rows, 50304, dtype=torch.bfloat16))
print(json.dumps([{'kernel': kernel.metadata.name, 'warps': kernel.metadata.num_warps,
                   **resources(kernel)} for kernel in made]))
'''


@pytest.mark.slow
def test_layers_of_few_rows_and_greedy_decoding_fit_in_registers(tmp_path):
    """Layers of GPT-2's shape with all savings, and the widest that `_few_rows` takes."""
    shapes = [(768, 3840), (4096, 4096)]
    cases = [(rows, int8, shape) for rows in (1, 8, 16) for int8 in (False, True)
             for shape in shapes]
    found = run_alone(LAYERS, json.dumps(cases), TRITON_CACHE_DIR=str(tmp_path))
    assert len(found) == 4 * len(cases) + 4
    assert all(kernel['spilled'] == 0 for kernel in found)
    for i, kernel in enumerate(found[:-4]):
        rows, _, shape = cases[i // 4]
        assert kernel['kernel'] == ('_few_rows' if rows <= 8 else '_linear')
        # a multiprocessor has room for two programs of GPT-2's layers: 264 run at once on an H100
        n = 2 if shape == shapes[0] else 1
        assert kernel['registers'] * 32 * kernel['warps'] <= 65536 // n, (cases[i // 4], kernel)
        assert kernel['shared'] <= 227 * 1024 // n, (cases[i // 4], kernel)
