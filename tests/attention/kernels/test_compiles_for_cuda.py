"""The kernels compile for an H100-class GPU, with the arguments that a decode step gives them: needs no GPU, only Triton."""
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = '''
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attention.kernels import decode, qkv
from kv.store import KVStore, Target

KINDS = {torch.float32: '*fp32', torch.bfloat16: '*bf16', torch.float16: '*fp16', torch.int8: '*i8', torch.int32: '*i32',
         torch.int64: '*i64'}
OPTIONS = ('num_warps', 'num_stages')


class Compiles:
    """In the place of a kernel: a launch compiles it, specialised as Triton would do for these arguments."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **kwargs):
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        names = self.kernel.arg_names
        given, signature, fixed, aligned = dict(zip(names, args)) | kwargs, {}, {}, {}
        for i, name in enumerate(names):
            x = given[name]
            constant = self.kernel.params[i].is_constexpr or x is None or (
                isinstance(x, int) and x == 1 and not self.kernel.params[i].do_not_specialize)
            if constant:
                signature[name], fixed[(i,)] = 'constexpr', x
            else:
                signature[name] = KINDS[x.dtype] if torch.is_tensor(x) else 'fp32' if isinstance(x, float) else 'i32'
                if torch.is_tensor(x) or (isinstance(x, int) and x % 16 == 0 and not self.kernel.params[i].do_not_specialize):
                    aligned[(i,)] = [['tt.divisibility', 16]]
        compiled = triton.compile(ASTSource(fn=self.kernel, signature=signature, constexprs=fixed, attrs=aligned),
                                  target=GPUTarget('cuda', 90, 32), options=options)
        ptx = compiled.asm['ptx']
        print(self.kernel.__name__, 'mma' if 'mma' in ptx else '-', 'cp.async' if 'cp.async' in ptx else '-', flush=True)


for name in ('_split', '_join'):
    setattr(decode, name, Compiles(getattr(decode, name)))
qkv._write = Compiles(qkv._write)

kind, kv_dtype, D = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3])
dtype = torch.bfloat16
B, H, HKV, S = 4, 12, 1, 256
store = KVStore(B, HKV, S, D, kv_dtype, dtype, torch.device('cpu'))
store.k = store._allocate((B, HKV, S), D, False)  # as on a GPU
q, numbers = torch.zeros(B, H, 1, D, dtype=dtype), torch.zeros(B, 1, dtype=torch.int64)
if kind == 'decode':
    decode.stored_attention(q, store.k, store.v, seen=numbers[:, 0], tuning=decode.Tuning(n_splits=4))
elif kind == 'int8_dot':
    decode.stored_attention(q, store.k, store.v, seen=numbers[:, 0], tuning=decode.Tuning(n_splits=4, int8_dot=True))
elif kind == 'pages':
    decode.stored_attention(q, store.k, store.v, seen=numbers[:, 0], table=numbers.int(), tuning=decode.Tuning(n_splits=1))
elif kind == 'chunk':
    decode.stored_attention(q.expand(B, H, 5, D), store.k, store.v, window=7, tuning=decode.Tuning(n_splits=2))
elif kind == 'tags':
    decode.stored_attention(q, store.k, store.v, q_pos=numbers, k_pos=numbers.expand(B, S), window=7,
                            tuning=decode.Tuning(n_splits=2))
elif kind == 'write':
    norm, table = torch.nn.RMSNorm(D, eps=1e-6, dtype=dtype), torch.zeros(B, 1, 1, D)
    qkv.write_qkv(torch.zeros(B, 1, H + 2 * HKV, D, dtype=dtype), H, norm, norm, (table, table),
                  Target(store.k, store.v, numbers, numbers))
    qkv.write_qkv(torch.zeros(B, 1, H, D, dtype=dtype), H, norm, None, (table, table))
'''


@pytest.mark.slow
@pytest.mark.parametrize('kind, kv_dtype, D', [
    ('decode', 'int8', 64), ('decode', 'bfloat16', 64), ('decode', 'float32', 64), ('int8_dot', 'int8', 64),
    ('decode', 'int8', 16), ('pages', 'int8', 128), ('chunk', 'int8', 64), ('tags', 'int8', 64), ('write', 'int8', 64),
    ('write', 'bfloat16', 80)])
def test_compiles(kind, kv_dtype, D, tmp_path, monkeypatch):
    pytest.importorskip('triton')
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)  # compiled, not interpreted
    monkeypatch.setenv('TRITON_CACHE_DIR', str(tmp_path))
    monkeypatch.setenv('TRITON_DEFAULT_FP_FUSION', '1')
    done = subprocess.run([sys.executable, '-c', PROGRAM, kind, kv_dtype, str(D)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    if kind == 'write':
        assert lines == ['_write - -'] * 2
        return
    tensor_cores = kv_dtype != 'float32'
    assert lines[0] == f"_split {'mma' if tensor_cores else '-'} cp.async"  # loads of the next keys run ahead
    assert lines[1:] == ['_join - -'] * (kind != 'pages')
