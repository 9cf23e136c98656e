"""What must happen before torch is imported, so that programs import this first.

A missing required package becomes a one-line error. Threads of OpenMP sleep soon: by default GNU's
spin for milliseconds at the end of each region, until the slowest thread has come. Where other
programs keep that thread from running, the spinning uses up the time in which it could have run,
and a training step takes many times as long as with one thread. The library takes 1,000 rounds
itself where threads outnumber processors. More of them help an idle machine and harm a busy one.

torch's tensors of 2 MB and more get huge pages where the system gives them on request (Linux).
"""
import os
import sys
from pathlib import Path

REQUIRED = ('torch', 'numpy', 'filelock', 'rich', 'tiktoken', 'tokenizers')
ROOT = Path(__file__).resolve().parents[1]


def excepthook(kind, error, trace):
    """For `sys.excepthook`: print one line for a missing package, otherwise the traceback."""
    if not (isinstance(error, ModuleNotFoundError) and error.name in REQUIRED):
        return previous(kind, error, trace)
    root = os.path.relpath(ROOT)
    activate = os.path.normpath(os.path.join(root, '.venv/bin/activate'))
    has_one = os.path.isfile(activate)
    advice = f'activate the environment (source {activate}) or ' if has_one else ''
    python = os.path.basename(sys.executable)
    print(f'error: this Python ({sys.executable}) has no {error.name}: {advice}'
          f'install with {python} -m pip install -e {root} (or make demo)', file=sys.stderr)


# the user's own choice comes first
if 'OMP_WAIT_POLICY' not in os.environ:
    os.environ.setdefault('GOMP_SPINCOUNT', '5000')
os.environ.setdefault('THP_MEM_ALLOC_ENABLE', '1')
previous, sys.excepthook = sys.excepthook, excepthook
