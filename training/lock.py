"""One writer in a folder at a time: two trainings into one out_dir would lose a model."""
import contextlib
import errno
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from config.errors import UserError
from training.distributed import begun

try:
    import fcntl
except ImportError:  # Windows: two writers are not kept apart there
    fcntl = None

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@contextlib.contextmanager
def only_writer(folder: Path, remedy: str) -> Iterator[None]:
    """Hold `folder` as its only writer; it is made if there is none, and removed again if it stays empty.

    The lock is the system's, on the open file .lock (flock): it ends with the process, however that
    ends, so that a dead one is no obstacle. What is in the file says who holds it. Where a network
    folder has no such locks, that text is all there is: a holder on this machine counts if it still
    runs, one on another machine until its file is deleted. Who only reads needs no lock.

    remedy: what to do, at the end of the error.
    Raises:
        UserError: another process writes there, or the folder cannot be made.
    """
    if fcntl is None:
        yield
        return
    path, made = folder / '.lock', not folder.exists()
    try:
        file = _locked(path, remedy)
    except OSError as e:
        raise UserError(f'{folder} cannot be written to: {e.strerror}') from e
    with file:
        try:
            file.truncate(0)
            file.write(json.dumps(this_process()))
            file.flush()
            yield
        finally:  # while the lock is held, so that nobody else's file is deleted
            with contextlib.suppress(OSError):
                path.unlink()
                if made:
                    folder.rmdir()  # where nothing was written


def _locked(path, remedy):
    """The open file, locked; its former content is read but kept."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = open(path, 'a+', encoding='utf-8')
        except FileNotFoundError:  # a run that wrote nothing has just removed its folder
            continue
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(_held(path, _holder_soon(file), remedy)) from None
            except OSError as e:
                if e.errno not in NO_LOCKS:
                    raise
                holder = _holder(file)
                if holder and not _is_dead(holder):
                    raise UserError(f'{_held(path, holder, remedy)}; if it is dead, delete {path}') from None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()  # its last holder deleted it in the meantime


def this_process() -> dict:
    return {'host': socket.gethostname(), 'pid': os.getpid(), 'begun': begun(os.getpid()),
            'since': time.strftime('%Y-%m-%d %H:%M:%S'),
            'command': shlex.join([Path(sys.executable).name, *sys.argv])}


def _holder(file) -> dict:
    """Who wrote the file; {} where it cannot be read, as when its holder has not written yet."""
    try:
        file.seek(0)
        found = json.loads(file.read())
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def _holder_soon(file) -> dict:
    """What is read of a holder that may have taken the lock just now, and writes in a moment."""
    for _ in range(20):
        if found := _holder(file):
            return found
        time.sleep(0.05)
    return {}


def _is_dead(holder) -> bool:
    """Whether it ran on this machine and does not any more."""
    return holder.get('host') == socket.gethostname() and holder.get('begun') != begun(holder.get('pid', 0))


def _held(path, holder, remedy) -> str:
    who = 'another process'
    if holder:
        who = (f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}: "
               f"{holder.get('command')}")
    return f'{path.parent} is being written by {who}. {remedy}'
