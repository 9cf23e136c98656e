"""Kernels compiled for an H100 on a machine without one, specialised as Triton would for the
arguments of a launch."""
import os
import re
import subprocess
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {torch.float32: '*fp32', torch.bfloat16: '*bf16', torch.float16: '*fp16',
         torch.int8: '*i8', torch.int32: '*i32', torch.int64: '*i64'}
OPTIONS = ('num_warps', 'num_stages')
FLOAT = os.environ.get('FLOAT', 'fp32')  # fp64: as Inductor of torch 2.11 passes Python's floats


class CompilesOnly:
    """Replaces a kernel: a launch compiles it and appends the compiled kernel to `made`."""

    def __init__(self, kernel, made: list):
        self.kernel, self.made = kernel, made

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **kwargs):
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        given = dict(zip(self.kernel.arg_names, args)) | kwargs
        source = ASTSource(self.kernel, *specialised(self.kernel, given))
        compiled = triton.compile(source, target=GPUTarget('cuda', 90, 32), options=options)
        self.made.append(compiled)


def specialised(kernel, given: dict) -> tuple[dict, dict, dict]:
    """Return (signature, constants, attributes) for a launch with these arguments."""
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        x, fixed = given[name], kernel.params[i].do_not_specialize
        is_one = isinstance(x, int) and x == 1
        if kernel.params[i].is_constexpr or x is None or (is_one and not fixed):
            signature[name], constants[(i,)] = 'constexpr', x
            continue
        if torch.is_tensor(x):
            signature[name], number = TYPES[x.dtype], x.data_ptr()
        else:
            signature[name], number = FLOAT if isinstance(x, float) else 'i32', x
        if isinstance(number, int) and number % 16 == 0 and not fixed:
            attributes[(i,)] = [['tt.divisibility', 16]]
    return signature, constants, attributes


def resources(compiled) -> dict:
    """Resources, read from the binary. registers: per thread. spilled: bytes of stack and local
    memory per thread, used for spilled registers. shared: bytes of shared memory per program."""
    program = os.path.join(os.path.dirname(triton.__file__), 'backends', 'nvidia', 'bin',
                           'cuobjdump')
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(compiled.asm['cubin'])
        file.flush()
        done = subprocess.run([program, '--dump-resource-usage', file.name], capture_output=True,
                              text=True, check=True)
    found = re.search(r'REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)', done.stdout)
    registers, stack, local = map(int, found.groups())
    return {'registers': registers, 'spilled': stack + local, 'shared': compiled.metadata.shared}
