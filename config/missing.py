"""Turn a missing required package into a one-line error; this must be imported first."""
import os
import sys
from pathlib import Path

REQUIRED = ('torch', 'numpy', 'rich', 'tiktoken', 'tokenizers')
ROOT = Path(__file__).resolve().parents[1]


def excepthook(kind, error, trace):
    """For `sys.excepthook`: print one line for a missing package, otherwise the traceback."""
    if not (isinstance(error, ModuleNotFoundError) and error.name in REQUIRED):
        return previous(kind, error, trace)
    root = os.path.relpath(ROOT)
    activate = os.path.normpath(os.path.join(root, '.venv/bin/activate'))
    advice = f'activate the environment (source {activate}) or ' * os.path.isfile(activate)
    python = os.path.basename(sys.executable)
    print(f'error: this Python ({sys.executable}) has no {error.name}: {advice}'
          f'install with {python} -m pip install -e {root} (or make demo)', file=sys.stderr)


previous, sys.excepthook = sys.excepthook, excepthook
