"""Locks on a folder: one writer at a time, and one preparation of a data set at a time.

A lock is the system's lock (flock) on a file in the folder. It ends with its process, however that
ends, so a dead holder is no obstacle. The holder deletes the file before it releases the lock.
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

try:
    import fcntl
except ImportError:  # Windows: there are no locks there
    fcntl = None

UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_thread = threading.local()  # .folders: those whose preparation lock this thread holds


@contextlib.contextmanager
def only_writer(folder: Path, remedy: str) -> Iterator[None]:
    """Hold `folder` as its only writer. A folder created here is removed again if it stays empty.

    The lock file names its holder. Where a network file system does not support locks, that text
    is the lock: a holder on this machine counts while it runs, one on another machine until the
    file is deleted. Readers need no lock.

    remedy: what the user can do, appended to the error.
    Raises:
        UserError: another process writes there, or the folder cannot be written to.
    """
    if fcntl is None:
        yield
        return
    path, created = folder / '.lock', not folder.exists()
    try:
        with _hold(path, lambda file: _lock_or_refuse(file, path, remedy),
                   f'{folder} cannot be written to') as file:
            file.truncate(0)
            file.write(json.dumps(this_process()))
            file.flush()
            yield
    finally:
        if created:
            with contextlib.suppress(OSError):
                folder.rmdir()  # fails unless it is empty


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the lock on preparing `folder`; wait for another holder. A thread may take it twice.
    UserError: the folder cannot be written to."""
    folder = Path(folder).resolve()
    mine = _thread.__dict__.setdefault('folders', set())
    if fcntl is None or folder in mine:
        yield
        return
    with _hold(folder / '.prepare.lock', lambda file: _lock_or_wait(file, folder.name),
               f'cannot prepare a dataset in {str(folder)!r}'):
        mine.add(folder)
        try:
            yield
        finally:
            mine.discard(folder)


@contextlib.contextmanager
def _hold(path, lock, error):
    """The file at `path`, locked with `lock`, and deleted at the end."""
    try:
        file = _open_locked(path, lock)
    except OSError as e:
        raise UserError(f'{error}: {e.strerror}') from e
    with file:
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


def _open_locked(path, lock):
    """Open the file at `path`, creating it and its folder, and lock it with `lock`."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            # the former holder may delete the file, or the folder, at any moment: then try again
            with contextlib.suppress(FileNotFoundError):
                file = stack.enter_context(open(path, 'a+', encoding='utf-8'))
                lock(file)
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    stack.pop_all()
                    return file


def _lock_or_wait(file, name):
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f'waiting for another process that prepares dataset {name}...', flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks


def _lock_or_refuse(file, path, remedy):
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        for _ in range(20):  # a holder that has just taken the lock writes its name a moment later
            if holder := _read_holder(file):
                break
            time.sleep(0.05)
        raise UserError(_describe(path, holder, remedy)) from None
    except OSError as e:
        if e.errno not in UNSUPPORTED:
            raise
        holder = _read_holder(file)
        here = holder.get('host') == socket.gethostname()
        is_dead = here and holder.get('begun') != process_start(holder.get('pid', 0))
        if holder and not is_dead:
            raise UserError(f'{_describe(path, holder, remedy)}; if it is dead, delete {path}'
                            ) from None


def this_process() -> dict:
    """The text of a writer's lock file."""
    return {'host': socket.gethostname(), 'pid': os.getpid(), 'begun': process_start(os.getpid()),
            'since': time.strftime('%Y-%m-%d %H:%M:%S'),
            'command': shlex.join([Path(sys.executable).name, *sys.argv])}


def process_start(pid: int) -> str:
    """Identifies a process of this machine, although process ids are reused: its id, its start in
    clock ticks and the boot. Without Linux's /proc the id and the host name only."""
    try:
        boot = Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()
        stat = Path(f'/proc/{pid}/stat').read_text(encoding='utf-8')
        ticks = stat.rpartition(')')[2].split()[19]
        return f'{pid}, {ticks} after {boot}'
    except (OSError, IndexError):
        return f'{pid}, {socket.gethostname()}'


def _read_holder(file) -> dict:
    """The holder that the file names; {} if it names none."""
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
