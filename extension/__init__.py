"""C++ extensions for CPUs, and the vectors and threads that they share (kernels.h, threads.h).

Each is compiled on first use for the local processor (with g++, clang++ or $CXX), cached in a
folder that only the user can access, and called through ctypes. Without a compiler, everything runs
in torch, more slowly.
"""
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import FileLock

from common.files import private_folder, user_cache

HERE = Path(__file__).parent
ARM = os.uname().machine in ('aarch64', 'arm64') if os.name == 'posix' else False
FLAGS = ('-O3', '-std=c++17', '-shared', '-fPIC', '-pthread', '-fopenmp-simd', '-fno-math-errno',
         '-fno-trapping-math',  # NaN and infinity must keep working
         '-mcpu=native' if ARM else '-march=native')
TIMEOUT = 120  # seconds


class Unavailable(Exception):
    """The extension cannot be built or loaded; the message says why."""


def opened(source: Path, checked) -> ctypes.CDLL | None:
    """Return the extension of this .cpp file, compiled if necessary, after `checked` has had it.
    None if it is unavailable, with a note on stderr."""
    try:
        folder = user_cache() / 'native'
        private_folder(folder)
        return checked(ctypes.CDLL(str(_compiled(source, folder))))
    except (Unavailable, OSError, subprocess.TimeoutExpired) as e:
        print(f'Note: no C++ extension ({e}); the CPU runs plain torch, which is slower',
              file=sys.stderr)
        return None


def _compiled(source: Path, folder: Path) -> Path:
    """The shared library in `folder` for this source, the headers beside it and here, compiler,
    flags and processor."""
    if os.name != 'posix':
        raise Unavailable('it is built on Linux and macOS only')
    names = (os.environ['CXX'],) if os.environ.get('CXX') else ('g++', 'clang++', 'c++')
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise Unavailable(f"no compiler: {' or '.join(names)} is needed")
    sources = [source, *sorted(source.parent.glob('*.h')), *sorted(HERE.glob('*.h'))]
    inputs = [compiler, *FLAGS, _processor(), *(path.read_text() for path in sources)]
    name = hashlib.sha256('\0'.join(inputs).encode()).hexdigest()[:16]
    path = folder / f'{name}.so'
    if path.is_file():
        return path
    with FileLock(folder.with_suffix('.lock')):
        if not path.is_file():
            _compile(compiler, source, path)
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
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, 'made.so')
        for openmp in (['-fopenmp'], []):  # Apple's compiler has none
            command = [compiler, *FLAGS, *openmp, f'-I{HERE}', str(source), '-o', str(made)]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  timeout=TIMEOUT, env=os.environ | {'TMPDIR': folder})
            if not (done.returncode and re.search('openmp|l(g|i)?omp', done.stderr)):
                break
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if 'error' in line]
            raise Unavailable(f'{compiler} fails: {(lines or ["no message"])[0].strip()}')
        made.chmod(0o700)  # whatever the umask
        os.replace(made, path)
