"""Locks on a folder: one writer at a time, and one preparation of a data set at a time.

Each is a lock of the package filelock on a file in the folder. The system releases it when its
process ends, even if that is killed.
"""
import contextlib
import errno
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from common.errors import UserError
from common.files import regular_only

UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP)  # of a file system without locks


@contextlib.contextmanager
def only_writer(folder: Path, remedy: str) -> Iterator[None]:
    """Lock `folder` against other writers. If it is created here, it is removed if left empty.
    Readers need no lock. Raises UserError if another process is writing there (named by its lock
    file), with the `remedy`, what the user can do, or if the folder is not writable."""
    path = folder / '.lock'
    with contextlib.ExitStack() as stack:
        try:
            with _errors(f'{folder} cannot be written to'):
                stack.enter_context(_held(FileLock(path), timeout=0))
                with open(path, 'a', opener=regular_only) as file:
                    file.truncate(0)
                    file.write(_this_process())
        except Timeout:
            raise UserError(f'{folder} is being written by {_holder(path)}. {remedy}') from None
        yield


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the lock for preparing `folder`, waiting until it is free. Reentrant within a thread.
    Raises UserError if the folder is not writable; like only_writer otherwise."""
    lock = FileLock(folder / '.prepare.lock', is_singleton=True)  # one object for a path
    with contextlib.ExitStack() as stack:
        if not lock.is_locked:  # by this thread
            with _errors(f'cannot prepare a dataset in {str(folder)!r}'):
                try:
                    stack.enter_context(_held(lock, timeout=0))
                except Timeout:
                    print(f'waiting for another process that prepares dataset {folder.name}...',
                          flush=True)
                    stack.enter_context(_held(lock, timeout=-1))
        yield


@contextlib.contextmanager
def _held(lock: FileLock, timeout: float) -> Iterator[None]:
    """Hold the lock, and delete its file, and the folder if it was created here and is empty."""
    path = Path(lock.lock_file)
    created = not os.path.exists(path.parent)  # False, no error, if the name is too long
    with contextlib.ExitStack() as stack:
        if created:
            stack.callback(_suppressed, path.parent.rmdir)
        path.parent.mkdir(parents=True, exist_ok=True)
        stack.enter_context(lock.acquire(timeout))
        # deleted while it is locked: another process that has opened it sees that, and tries again
        stack.callback(_suppressed, path.unlink)
        yield


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    """Raise UserError, which begins with `what`, if the system refuses. Without locks, go on."""
    try:
        yield
    except Timeout:
        raise
    except OSError as e:
        if e.errno not in UNSUPPORTED:
            raise UserError(f'{what}: {e}') from e
        print('Note: the file system has no locks, so that nothing stops another process from '
              f'writing there ({e})', file=sys.stderr)


def _suppressed(remove) -> None:
    with contextlib.suppress(OSError):
        remove()


def _this_process() -> str:
    command = shlex.join([Path(sys.executable).name, *sys.argv])
    since = time.strftime('%Y-%m-%d %H:%M:%S')
    return f'process {os.getpid()} on {socket.gethostname()} since {since}: {command}'


def _holder(path: Path) -> str:
    """Read who has locked the file, which its holder writes just after it has locked it."""
    with contextlib.suppress(OSError):
        return ' '.join(path.read_text(errors='replace')[:1000].split()) or 'another process'
    return 'another process'
