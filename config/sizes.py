"""Sizes in bytes: reading and printing them, and the machine's memory. No torch here."""
import os
import re
from decimal import Decimal
from pathlib import Path

from config.errors import UserError

UNITS = {'': 1, 'K': 10 ** 3, 'M': 10 ** 6, 'G': 10 ** 9, 'T': 10 ** 12,
         'KI': 2 ** 10, 'MI': 2 ** 20, 'GI': 2 ** 30, 'TI': 2 ** 40}  # each may be followed by B


def parse_bytes(text: str, name: str = 'budget') -> int:
    """'1GB', '1G', '1e9' -> 1_000_000_000, '512MiB' -> 536_870_912, '4096' -> 4096.
    Raises UserError, starting with the key `name`, if it is not a size or less than a byte."""
    match = re.fullmatch(r'\s*([0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)\s*([A-Za-z]*)\s*', text)
    unit = UNITS.get(match[2].upper().removesuffix('B'), 0) if match else 0
    n = int(Decimal(match[1]) * unit) if unit else 0  # Decimal: exact
    if n < 1:
        raise UserError(f'{name}={text!r}: a number of at least 1 is needed, '
                        "as '1GB' or '1G' (10^9), '1GiB' (2^30), '4096' or '4e12'")
    return n


def physical_memory() -> int:
    """Return the bytes of memory of this machine, 0 if unknown."""
    try:
        return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    except (AttributeError, ValueError, OSError):
        return 0


def available_memory(root: Path = Path('/')) -> int:
    """Return the bytes available without swapping, within the limits of this process's control
    groups; 0 if unknown. root: parent of proc/ and sys/."""
    try:
        meminfo = (root / 'proc/meminfo').read_text()
        free = int(re.search(r'^MemAvailable:\s*(\d+) kB', meminfo, re.M)[1]) * 1024
    except (OSError, TypeError):  # TypeError: no such line
        free = physical_memory()
    limits = [_left_in(folder, *files) for folder, files in _memory_groups(root)]
    return min((n for n in (free, *limits) if n), default=0)


# files with a group's limit and usage, and the key of evictable memory in memory.stat
CGROUP_V2 = ('memory.max', 'memory.current', 'inactive_file')
CGROUP_V1 = ('memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file')


def _memory_groups(root: Path):
    """Yield (folder, files) for this process's memory control groups and their ancestors, whose
    limits also apply. In a container the path may be the host's: only the mount exists."""
    mounted = {'': (root / 'sys/fs/cgroup', CGROUP_V2),
               'memory': (root / 'sys/fs/cgroup/memory', CGROUP_V1)}
    yield from mounted.values()
    try:
        entries = (root / 'proc/self/cgroup').read_text().splitlines()
    except OSError:
        return
    for entry in entries:
        _, controllers, path = entry.split(':', 2)
        inner = Path(path.lstrip('/'))
        for controller in mounted.keys() & controllers.split(','):
            folder, files = mounted[controller]
            yield from ((folder / part, files) for part in (inner, *inner.parents))


def _left_in(folder: Path, limit: str, usage: str, evictable: str) -> int:
    """Return how many more bytes a group may use, at least 1; 0 if it has no limit."""
    try:
        limit, usage = (int((folder / name).read_text()) for name in (limit, usage))
    except (OSError, ValueError):  # no such group, or 'max'
        return 0
    if limit > 2 ** 60:  # version 1 writes nearly 2^63 for "no limit"
        return 0
    stat = folder / 'memory.stat'
    cache = re.search(rf'^{evictable} (\d+)$', stat.read_text() if stat.is_file() else '', re.M)
    return max(1, limit - usage + (int(cache[1]) if cache else 0))


def nice_bytes(n: float) -> str:
    """1,048,576 -> '1.05 MB' (decimal units)."""
    for unit, size in (('TB', 1e12), ('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
        if n >= size:
            return f'{n / size:.3g} {unit}' if n < 1000 * size else f'{n / size:,.0f} {unit}'
    return f'{n:.0f} B'
