"""One preparation of a folder at a time."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from config.errors import UserError

try:
    import fcntl
except ImportError:  # Windows: two preparations at once are not kept apart there
    fcntl = None

_mine = threading.local()  # .folders: those that this thread has locked


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the lock on preparing `folder`, waiting for it if need be; the thread that holds it may take it again.

    It belongs to the open file .prepare.lock: that of a dead process blocks nobody. UserError if `folder` cannot be
    written to.
    """
    folder = Path(folder).resolve()
    held = _mine.__dict__.setdefault('folders', set())
    if fcntl is None or folder in held:
        yield
        return
    path = folder / '.prepare.lock'
    try:
        file = _locked(path)
    except OSError as error:
        raise UserError(f'cannot prepare a dataset in {str(folder)!r}: {error.strerror}') from None
    held.add(folder)
    try:
        yield
    finally:
        held.discard(folder)
        with contextlib.suppress(OSError):
            path.unlink()  # while we hold it; who waits for it sees that it is gone, and makes a new one
        file.close()


def _locked(path: Path) -> TextIO:
    waiting = False
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)  # the process waited for may remove it
        file = open(path, 'a')
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waiting:
                print(f'waiting for another process that prepares dataset {path.parent.name}...', flush=True)
            waiting = True
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            return file  # a file system without locks
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()
