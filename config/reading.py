"""Read small files that others may have made: regular files only, and of a limited size."""
import errno
import json
import os
import stat
from pathlib import Path

MAX_JSON_BYTES = 16 * 2 ** 20  # as Python objects, JSON may take 25 times the memory of its text


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """Return the contents of a file of at most `limit` bytes.

    Raises OSError if it cannot be read, is larger, or is not a regular file: opening a FIFO in the
    ordinary way would wait for a writer forever.
    """
    fd = os.open(path, os.O_RDONLY | getattr(os, 'O_NONBLOCK', 0) | getattr(os, 'O_BINARY', 0))
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, 'it is not a regular file', str(path))
        if info.st_size > limit:
            raise OSError(errno.EFBIG, f'it is larger than {limit:,} bytes', str(path))
        with open(fd, 'rb', closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(fd)


def read_json(path: Path):
    """Return the JSON value in a file. Raises OSError as `read_bytes` does, and ValueError if the
    file is not JSON, not UTF-8, or nested too deeply."""
    try:
        return json.loads(read_bytes(path).decode('utf-8-sig'))
    except RecursionError:
        raise ValueError('it is nested too deeply') from None
