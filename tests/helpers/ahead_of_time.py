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


def innermost_loop(compiled) -> dict:
    """Count accesses to global memory in the only loop of a kernel, after pipelining.

    copies: asynchronous copies. loads: tensor loads that the iteration waits for. scalars:
    scalars loaded for the same iteration. scalars_ahead: scalars loaded for the next iteration.
    """
    lines, found = compiled.asm['ttgir'].splitlines(), []
    for first, line in enumerate(lines):
        if 'scf.for' in line:
            indent = line[:len(line) - len(line.lstrip())]
            last = next(i for i in range(first, len(lines))
                        if lines[i].startswith(indent + '}'))
            found.append([line.split(' loc(')[0] for line in lines[first + 1:last]])
    [body] = found
    copies = [line for line in body if 'async_copy_global_to_local' in line]
    loads = [line for line in body if ' tt.load ' in line]
    scalars = [line.split()[0] for line in loads if 'tensor<' not in line]
    ahead = [name for name in scalars if all('scf.yield' in line for line in uses(name, body))]
    return {'copies': len(copies), 'loads': len(loads) - len(scalars),
            'scalars': len(scalars) - len(ahead), 'scalars_ahead': len(ahead)}


def uses(name: str, body: list[str]) -> list[str]:
    """The lines that contain a value's name, except the first, which defines it."""
    return [line for line in body if re.search(re.escape(name) + r'\b', line)][1:]


def loop_instructions(compiled) -> int:
    """Instructions of a warp in the longest loop, read from the binary."""
    lines, labels, count, longest = _disassembled(compiled, 'nvdisasm', '-c'), {}, 0, 0
    for line in lines:
        label = re.search(r'^(\.L_\w+):', line)
        target = re.search(r'BRA.*?(\.L_\w+)', line)
        if label:
            labels[label[1]] = count
        count += bool(re.search(r'^\s*/\*[0-9a-f]+\*/\s+\S', line))
        if target and target[1] in labels:  # a branch backwards
            longest = max(longest, count - labels[target[1]])
    return longest


def resources(compiled) -> dict:
    """Resources, read from the binary. registers: per thread. spilled: bytes of stack and local
    memory per thread, used for spilled registers. shared: bytes of shared memory per program."""
    output = '\n'.join(_disassembled(compiled, 'cuobjdump', '--dump-resource-usage'))
    found = re.search(r'REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)', output)
    registers, stack, local = map(int, found.groups())
    return {'registers': registers, 'spilled': stack + local, 'shared': compiled.metadata.shared}


def _disassembled(compiled, *command) -> list[str]:
    program, *options = command
    path = os.path.join(os.path.dirname(triton.__file__), 'backends', 'nvidia', 'bin', program)
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(compiled.asm['cubin'])
        file.flush()
        done = subprocess.run([path, *options, file.name], capture_output=True, text=True,
                              check=True)
    return done.stdout.splitlines()
