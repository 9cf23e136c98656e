"""Locks on a folder: one writer at a time, and one preparation of a data set at a time.

A lock is a system lock (flock) on a file in the folder. It is released when its process ends, even
by a crash, so it is never stale. The holder deletes the file before releasing the lock.
"""
import contextlib
import errno
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from config.errors import UserError
from config.files import regular_only

try:
    import fcntl
except ImportError:  # Windows: no locks
    fcntl = None

UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_thread = threading.local()  # .folders: the ones whose preparation lock this thread holds


def only_writer(folder: Path, remedy: str) -> contextlib.AbstractContextManager[None]:
    """Lock `folder` against other writers. If it is created here, it is removed if left empty.
    Readers need no lock. Raises UserError if another process is writing there (named by its lock
    file), with the `remedy`, what the user can do, or if the folder is not writable."""
    return _held(folder / '.lock', f'{folder} cannot be written to', remedy)


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the lock for preparing `folder`, waiting until it is free. Reentrant within a thread.
    Raises UserError if the folder is not writable; like only_writer otherwise."""
    mine, name = _thread.__dict__.setdefault('folders', set()), folder.resolve()
    if name in mine:
        yield
        return
    with _held(folder / '.prepare.lock', f'cannot prepare a dataset in {str(folder)!r}'):
        mine.add(name)
        try:
            yield
        finally:
            mine.discard(name)


@contextlib.contextmanager
def _held(path: Path, error: str, remedy: str | None = None) -> Iterator[None]:
    """Hold the lock file at `path`, and delete it at the end. remedy: None = wait until it is free.
    Raises UserError, which begins with `error` if the system refuses."""
    created = not os.path.exists(path.parent)  # False, no error, if the name is too long
    with contextlib.ExitStack() as stack:
        if created:
            stack.callback(_suppressed, path.parent.rmdir)  # fails unless it is empty
        try:
            file = stack.enter_context(_open_locked(path, remedy))
            stack.callback(_suppressed, path.unlink)
            file.truncate(0)
            since = time.strftime('%Y-%m-%d %H:%M:%S')
            command = shlex.join([Path(sys.executable).name, *sys.argv])
            file.write(f'process {os.getpid()} on {socket.gethostname()} since {since}: {command}')
            file.flush()
        except OSError as e:
            raise UserError(f'{error}: {e.strerror}') from e
        yield


def _suppressed(remove) -> None:
    with contextlib.suppress(OSError):
        remove()


def _open_locked(path, remedy):
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            # the previous holder may delete the file or the folder at any time: if so, try again
            with contextlib.suppress(FileNotFoundError):
                file = stack.enter_context(open(path, 'a+', errors='replace', opener=regular_only))
                _lock(file, path, remedy)
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    stack.pop_all()
                    return file


def _lock(file, path, remedy):
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if remedy is not None:
            raise UserError(f'{path.parent} is being written by {_holder(file)}. {remedy}'
                            ) from None
        print(f'waiting for another process that prepares dataset {path.parent.name}...',
              flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as e:
        if e.errno not in UNSUPPORTED:
            raise
        print(f'Note: the file system of {path.parent} has no locks, so that nothing stops another '
              'process from writing there', file=sys.stderr)


def _holder(file) -> str:
    """Read who has locked the file, which its holder writes shortly after it has locked it."""
    for _ in range(20):
        file.seek(0)
        if found := file.read(1000):
            return ' '.join(found.split())
        time.sleep(0.05)
    return 'another process'
