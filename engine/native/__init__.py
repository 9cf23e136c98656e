"""The C++ extension for CPUs: matmuls and whole decode steps at memory speed.

Compiled on first use for the local processor (with g++, clang++ or $CXX), and cached in a folder
that only the user can access. Called through ctypes. Without a compiler, everything runs in torch,
more slowly.
"""
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from config.files import is_trusted, private_folder, user_cache

HERE = Path(__file__).parent
FLAGS = ('-O3', '-std=c++17', '-shared', '-fPIC', '-march=native', '-fopenmp', '-fno-math-errno',
         '-fno-trapping-math')  # NaN and infinity must keep working
TIMEOUT = 120  # seconds


class Unavailable(Exception):
    """The extension cannot be built or loaded; the message says why."""


_wanted = True  # see `use`


def use(on: bool) -> None:
    """Enable or disable the extension in this process; False = plain torch."""
    global _wanted
    _wanted = on


def library() -> ctypes.CDLL | None:
    """Return the extension, compiled if necessary. None if it is disabled or unavailable."""
    return _library() if _wanted else None


@functools.cache
def _library():
    return opened(HERE / 'decode.cpp', _checked)


def opened(source: Path, checked) -> ctypes.CDLL | None:
    """Return the extension of this .cpp file, compiled if necessary, after `checked` has had it.
    None if it is unavailable, with a note on stderr."""
    try:
        path = _compiled(source)
        try:
            return checked(ctypes.CDLL(str(path)))
        except OSError as e:
            raise Unavailable(str(e)) from e
    except Unavailable as e:
        print(f'Note: no C++ extension ({e}); the CPU runs plain torch, which is slower',
              file=sys.stderr)
        return None


def _compiled(source: Path) -> Path:
    """The shared library for this source, the headers here, compiler, flags and processor."""
    if os.name != 'posix':
        raise Unavailable('it is built on Linux and macOS only')
    names = (os.environ['CXX'],) if os.environ.get('CXX') else ('g++', 'clang++', 'c++')
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise Unavailable(f"no compiler: {' or '.join(names)} is needed")
    sources = [source, *sorted(HERE.glob('*.h'))]
    inputs = [compiler, *FLAGS, _processor(), *(path.read_text() for path in sources)]
    name = hashlib.sha256('\0'.join(inputs).encode()).hexdigest()[:16]
    path = user_cache() / 'native' / f'{name}.so'
    try:
        private_folder(path.parent)
        if not is_trusted(path):  # anyone can compute its name: a file of another user is replaced
            _compile(compiler, source, path)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise Unavailable(f'{compiler}: {e}') from e
    return path


def _processor() -> str:
    """Identify the processor for -march=native, since machines may share a home folder."""
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:
        return os.uname().machine
    kept = (line for line in lines if line.startswith(('flags', 'model name', 'Features')))
    return '\n'.join(dict.fromkeys(kept))


def _compile(compiler: str, source: Path, path: Path) -> None:
    """Compile to a temporary file first, since another process may be compiling too."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, 'made.so')
        command = [compiler, *FLAGS, f'-I{HERE}', str(source), '-o', str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if 'error' in line]
            raise Unavailable(f'{compiler} fails: {(lines or ["no message"])[0].strip()}')
        made.chmod(0o700)  # whatever the umask
        os.replace(made, path)


def _checked(found: ctypes.CDLL) -> ctypes.CDLL:
    found.nanokv_sizes.restype = ctypes.c_int64
    for k, struct in enumerate((Linear, Slot, Layer, Model, Step)):
        if found.nanokv_sizes(ctypes.c_int64(k)) != ctypes.sizeof(struct):
            raise Unavailable(f'{struct.__name__} has a different size in the extension')
    for name in ('nanokv_decode', 'nanokv_linear'):
        getattr(found, name).restype = None
    return found


# -- the structs of kernels.h and decode.cpp -------------------------------------------------------

FLOAT32, BFLOAT16, INT8, INT4 = range(4)
DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}  # of weights in floats
STORE, ADD, GELU_EXACT, GELU_TANH, RELU2 = range(5)


def _fields(pointers='', int64='', int32=''):
    """Fields in this order: pointers, then int64, then int32."""
    kinds = ((pointers, ctypes.c_void_p), (int64, ctypes.c_int64), (int32, ctypes.c_int32))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class Linear(ctypes.Structure):
    _fields_ = _fields('weight scale bias', 'n k', 'dtype group')


class Slot(ctypes.Structure):
    _fields_ = _fields('k v k_scale v_scale', 'capacity', 'dtype ring paged transposed')


class Layer(ctypes.Structure):
    _fields_ = [*_fields('ln_1 ln_1_bias ln_2 ln_2_bias q_norm k_norm cos sin sink'),
                *((name, Linear) for name in ('c_attn', 'attn_proj', 'c_fc', 'mlp_proj')),
                *_fields(int32='slot owns')]


class Model(ctypes.Structure):
    _fields_ = [*_fields('layers slots wte wpe ln_f ln_f_bias'), ('lm_head', Linear),
                *_fields(int64='n_layer n_slot n_embd n_head n_kv_head head_dim',
                         int32='wte_dtype wpe_dtype activation round_kv'),
                ('act_clamp', ctypes.c_float)]


class Step(ctypes.Structure):
    _fields_ = [*_fields('tokens positions rows later wanted table',
                         'm n_wanted table_width threads'),
                ('logits', ctypes.c_void_p)]
