"""Files in folders that others made or can write to, and folders for this user alone.

A folder from somebody else may hold links or named pipes in the places of a program's files.
Nothing here follows such a link to write: a new file replaces it (`replacing`), and a file that is
changed in place has to be a regular one (`regular_only`). Only regular files of a limited size are
read (`read_bytes`).
"""
import atexit
import contextlib
import errno
import json
import os
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError

# on Windows there are neither of these flags
NO_LINK = getattr(os, 'O_NOFOLLOW', 0)
NO_WAIT = getattr(os, 'O_NONBLOCK', 0)  # do not wait for the other end of a named pipe
MAX_JSON_BYTES = 16 * 2 ** 20  # as Python objects, JSON may take 25 times the memory of its text


def regular_only(path, flags: int) -> int:
    """An opener for `open` with a mode that writes. Raises OSError if the file is a link, is not a
    regular file, or has a second name, perhaps in another folder (a hard link)."""
    try:
        fd = os.open(path, flags | NO_LINK | NO_WAIT, 0o666)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise OSError(e.errno, f'{path} is a link: delete it') from e
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(fd)
        raise OSError(errno.EINVAL, f'{path} is not a regular file with one name: delete it')
    return fd


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """Return the contents of a file of at most `limit` bytes. Raises OSError if it cannot be read,
    is larger, or is not a regular file: opening a FIFO in the ordinary way would wait for a writer
    forever."""
    with open(path, 'rb', opener=lambda path, flags: os.open(path, flags | NO_WAIT)) as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, 'it is not a regular file', str(path))
        if info.st_size > limit:
            raise OSError(errno.EFBIG, f'it is larger than {limit:,} bytes', str(path))
        return file.read(limit)


def read_text(path: Path | str, name: str) -> str:
    """Return the text of a UTF-8 file without a byte order mark, in which line ends become '\\n'.
    UserError, which begins with `name`: if it cannot be read."""
    try:
        return Path(path).read_text(encoding='utf-8-sig')
    except OSError as e:
        raise UserError(f'{name} cannot be read: {e.strerror or e}') from e
    except ValueError as e:  # or a null character in the path
        raise UserError(f'{name} cannot be read, it is not UTF-8 text: {e}') from e


def read_json(path: Path):
    """Return the JSON value in a file. Raises OSError as `read_bytes` does, and ValueError if the
    file is not JSON, not UTF-8, or nested too deeply."""
    try:
        return json.loads(read_bytes(path).decode('utf-8-sig'))
    except RecursionError:
        raise ValueError('it is nested too deeply') from None


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, and its folder. Raises UserError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(text, encoding='utf-8')
    except OSError as e:
        raise UserError(f'{path} cannot be written: {e.strerror or e}') from e


def write_json(path: Path | str, document) -> None:
    write_whole(Path(path), json.dumps(document, indent=1) + '\n')


def owner_only(path, flags: int) -> int:
    """An opener for `open` that creates files which only their owner can read (0600)."""
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name of a temporary file, which then replaces `path` atomically. The name cannot be
    predicted, so that nobody can have put a link there."""
    temporary = path.with_name(f'.{path.name}.{uuid.uuid4().hex}.tmp')
    try:
        yield temporary
        os.replace(temporary, path)
        with contextlib.suppress(OSError):  # not every system can open or sync a folder
            fd = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    finally:
        with contextlib.suppress(OSError):  # renaming a link onto its own file does nothing
            temporary.unlink()


def private_folder(folder: Path) -> None:
    """Create `folder` and the folders above it, for this user alone (0700). Raises OSError if it
    exists, and belongs to another user or can be changed by others."""
    for path in (*reversed(folder.parents), folder):  # mkdir(parents=True) would use the umask
        path.mkdir(0o700, exist_ok=True)
    status = folder.stat()
    if os.name == 'posix' and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
        raise PermissionError(errno.EPERM, f'other users can change {folder}: chmod go-w')


def user_cache() -> Path:
    """Return $XDG_CACHE_HOME/nanokv or ~/.cache/nanokv. As in the XDG specification, a relative
    path in the variable is ignored: it would be a folder of whatever the working directory is."""
    caches = Path(os.environ.get('XDG_CACHE_HOME', ''))
    return (caches if caches.is_absolute() else Path.home() / '.cache') / 'nanokv'


def use_own_compiler_cache() -> None:
    """Let torch.compile and Triton keep their programs in a private folder, unless the environment
    names another. torch's default is in /tmp under a name that any other user can create first, and
    Triton's has the mode of the umask. If there cannot be one, a note says so, and it is a new one
    for this process."""
    folders = {'TORCHINDUCTOR_CACHE_DIR': '', 'TRITON_CACHE_DIR': 'triton'}
    unset = [name for name in folders if not os.environ.get(name)]
    if not unset:
        return
    folder = user_cache() / 'inductor'
    try:
        private_folder(folder)
    except OSError as e:
        print(f'Note: what is compiled is not kept in {folder} ({e.strerror})', file=sys.stderr)
        folder = Path(tempfile.mkdtemp(prefix='nanokv-'))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in unset:
        os.environ[name] = str(folder / folders[name])
