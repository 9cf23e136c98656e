"""Locks on a folder: one writer at a time, and one preparation of a data set at a time.

A lock is a system lock (flock) on a file in the folder. It is released when its process ends, even
by a crash, so it is never stale. The holder deletes the file before releasing the lock.
"""
import contextlib
import errno
import json
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


@contextlib.contextmanager
def only_writer(folder: Path, remedy: str) -> Iterator[None]:
    """Lock `folder` against other writers. If it is created here, it is removed if left empty.

    The lock file identifies its holder. On network file systems without locks, that text is the
    lock: a holder on this machine is valid while it runs, one on another machine until the file is
    deleted. Readers need no lock.

    remedy: what the user can do, appended to the error.
    Raises:
        UserError: if another process is writing there, or the folder is not writable.
    """
    created = not folder.exists()
    try:
        with _held(folder / '.lock', f'{folder} cannot be written to', remedy):
            yield
    finally:
        if created:
            with contextlib.suppress(OSError):
                folder.rmdir()  # fails unless it is empty


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the lock for preparing `folder`, waiting until it is free. Reentrant within a thread.
    Raises UserError if the folder is not writable."""
    folder = Path(folder).resolve()
    mine = _thread.__dict__.setdefault('folders', set())
    if folder in mine:
        yield
        return
    with _held(folder / '.prepare.lock', f'cannot prepare a dataset in {str(folder)!r}'):
        mine.add(folder)
        try:
            yield
        finally:
            mine.discard(folder)


@contextlib.contextmanager
def _held(path: Path, error: str, remedy: str | None = None) -> Iterator[None]:
    """Hold the lock file at `path`, and delete it at the end. remedy: None = wait until it is free.
    Raises UserError, which begins with `error` if the system refuses."""
    if fcntl is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(_open_locked(path, remedy))
            stack.callback(_delete, path)
            file.truncate(0)
            file.write(json.dumps(this_process()))
            file.flush()
        except OSError as e:
            raise UserError(f'{error}: {e.strerror}') from e
        yield


def _delete(path):
    with contextlib.suppress(OSError):
        path.unlink()


def _open_locked(path, remedy):
    """Open the file at `path`, creating it and its folder, and lock it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            # the previous holder may delete the file or the folder at any time: if so, try again
            with contextlib.suppress(FileNotFoundError):
                file = stack.enter_context(open(path, 'a+', encoding='utf-8', opener=regular_only))
                _lock(file, path, remedy)
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    stack.pop_all()
                    return file


def _lock(file, path, remedy):
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if remedy is None:
            print(f'waiting for another process that prepares dataset {path.parent.name}...',
                  flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
            return
        deadline = time.monotonic() + 1  # a new holder writes its name shortly after it has locked
        while not (holder := _read_holder(file)) and time.monotonic() < deadline:
            time.sleep(0.05)
        raise UserError(_describe(path, holder, remedy)) from None
    except OSError as e:
        if e.errno not in UNSUPPORTED:
            raise
        holder = _read_holder(file)
        here = holder.get('host') == socket.gethostname()
        is_dead = here and holder.get('begun') != process_start(holder.get('pid', 0))
        if holder and not is_dead and remedy is not None:
            raise UserError(f'{_describe(path, holder, remedy)}; if it is dead, delete {path}'
                            ) from None


def this_process() -> dict:
    """Describe this process, for the lock file."""
    return {'host': socket.gethostname(), 'pid': os.getpid(), 'begun': process_start(os.getpid()),
            'since': time.strftime('%Y-%m-%d %H:%M:%S'),
            'command': shlex.join([Path(sys.executable).name, *sys.argv])}


def process_start(pid: int) -> str:
    """Return an id of a process that is unique although process ids are reused: its pid, start time
    in clock ticks and boot id. Without Linux's /proc, only its pid and the host name."""
    try:
        boot = Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()
        stat = Path(f'/proc/{pid}/stat').read_text(encoding='utf-8')
        ticks = stat.rpartition(')')[2].split()[19]
        return f'{pid}, {ticks} after {boot}'
    except (OSError, IndexError):
        return f'{pid}, {socket.gethostname()}'


def _read_holder(file) -> dict:
    """Return the holder recorded in the file, {} if there is none."""
    try:
        file.seek(0)
        found = json.loads(file.read())
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def _describe(path, holder, remedy) -> str:
    who = 'another process'
    if holder:
        who = (f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}: "
               f"{holder.get('command')}")
    return f'{path.parent} is being written by {who}. {remedy}'
