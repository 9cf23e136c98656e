"""Kernels compiled for an H100 on a machine that has none, specialised as Triton would do for the arguments of a launch."""
import os
import re
import subprocess
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {torch.float32: '*fp32', torch.bfloat16: '*bf16', torch.float16: '*fp16', torch.int8: '*i8', torch.int32: '*i32',
         torch.int64: '*i64'}
OPTIONS = ('num_warps', 'num_stages')


class CompilesOnly:
    """In the place of a kernel: a launch compiles it, and adds what the compiler made to `made`."""

    def __init__(self, kernel, made: list):
        self.kernel, self.made = kernel, made

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **kwargs):
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        source = ASTSource(self.kernel, *specialised(self.kernel, dict(zip(self.kernel.arg_names, args)) | kwargs))
        self.made.append(triton.compile(source, target=GPUTarget('cuda', 90, 32), options=options))


def specialised(kernel, given: dict) -> tuple[dict, dict, dict]:
    """(signature, constants, attributes) of a launch with these arguments."""
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        x, fixed = given[name], kernel.params[i].do_not_specialize
        if kernel.params[i].is_constexpr or x is None or (isinstance(x, int) and x == 1 and not fixed):
            signature[name], constants[(i,)] = 'constexpr', x
            continue
        signature[name] = TYPES[x.dtype] if torch.is_tensor(x) else 'fp32' if isinstance(x, float) else 'i32'
        number = x.data_ptr() if torch.is_tensor(x) else x
        if isinstance(number, int) and number % 16 == 0 and not fixed:
            attributes[(i,)] = [['tt.divisibility', 16]]
    return signature, constants, attributes


def innermost_loop(compiled) -> dict:
    """What the loop of a kernel with one loop does with global memory, after pipelining: asynchronous copies; loads of tensors,
    for which the iteration waits; scalars that it loads for itself; scalars that it loads for the next iteration."""
    lines, found = compiled.asm['ttgir'].splitlines(), []
    for first, line in enumerate(lines):
        if 'scf.for' in line:
            indent = line[:len(line) - len(line.lstrip())]
            last = next(i for i in range(first, len(lines)) if lines[i].startswith(indent + '}'))
            found.append([line.split(' loc(')[0] for line in lines[first + 1:last]])
    [body] = found
    loads = [line.split()[0] for line in body if ' tt.load ' in line and 'tensor<' in line]
    scalars = [line.split()[0] for line in body if ' tt.load ' in line and 'tensor<' not in line]
    uses = {name: [line for line in body if re.search(re.escape(name) + r'\b', line)][1:] for name in scalars}
    ahead = [name for name in scalars if all('scf.yield' in line for line in uses[name])]
    return {'copies': sum('async_copy_global_to_local' in line for line in body), 'loads': len(loads),
            'scalars': len(scalars) - len(ahead), 'scalars_ahead': len(ahead)}


def resources(compiled) -> dict:
    """Registers a thread, and bytes of its stack and local memory (where registers are spilled to), from the binary."""
    tool = os.path.join(os.path.dirname(triton.__file__), 'backends', 'nvidia', 'bin', 'cuobjdump')
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(compiled.asm['cubin'])
        file.flush()
        told = subprocess.run([tool, '--dump-resource-usage', file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = map(int, re.search(r'REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)', told).groups())
    return {'registers': registers, 'spilled': stack + local, 'shared': compiled.metadata.shared}
