"""Tracing and compiling as on a GPU, on a machine without one: Triton believes that its target is
an H100, and kernels run in its interpreter.

Use it in a separate process (`run_alone`), because the patches apply to the entire process.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class H100:
    """Replaces Triton's driver."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget('cuda', 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def pretend() -> None:
    """Keep kernels `JITFunction`s, as on a GPU, so that Dynamo can trace and AOTAutograd can
    analyse them, but interpret them when they are launched."""
    import torch.utils._triton
    torch.utils._triton.has_triton = lambda: True
    import triton
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction
    triton.runtime.driver.set_active(H100())
    interpreted = {}

    def run(self, *args, grid, warmup=False, num_warps=4, num_stages=3, **kwargs):
        return interpreter(self).run(*args, grid=grid, warmup=warmup, **kwargs)

    def interpreter(kernel):
        return interpreted.setdefault(kernel.fn, InterpretedFunction(kernel.fn))
    JITFunction.run = run
    JITFunction.__call__ = lambda self, *args, **kwargs: interpreter(self)(*args, **kwargs)
    from attention import backends
    backends.INTERPRETING = True
    backends._enabled = True


def run_alone(program: str, *args: str, **environment: str) -> dict:
    """Run a Python program in a separate process, in the root of the checkout. Return its last
    line of output, parsed as JSON."""
    env = {k: v for k, v in os.environ.items() if k != 'TRITON_INTERPRET'} | environment
    done = subprocess.run([sys.executable, '-c', program, *args], cwd=ROOT, capture_output=True,
                          text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
