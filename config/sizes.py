"""Sizes in bytes, as people write them. No torch here."""
import os
import re
from decimal import Decimal
from pathlib import Path

from config.errors import UserError

UNITS = {'': 1, 'K': 10 ** 3, 'M': 10 ** 6, 'G': 10 ** 9, 'T': 10 ** 12,
         'KI': 2 ** 10, 'MI': 2 ** 20, 'GI': 2 ** 30, 'TI': 2 ** 40}  # each may be followed by B


def parse_bytes(text: str, name: str = 'budget') -> int:
    """'1GB', '1G', '1e9' -> 1_000_000_000, '512MiB' -> 536_870_912, '4096' -> 4096.

    name: the key's, for the message.

    Raises:
        UserError: something else, or less than a byte.
    """
    match = re.fullmatch(r'\s*([0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)\s*([A-Za-z]*)\s*', text)
    unit = UNITS.get(match[2].upper().removesuffix('B'), 0) if match else 0
    n = int(Decimal(match[1]) * unit) if unit else 0  # Decimal: not a byte lost to rounding
    if n < 1:
        raise UserError(f'{name}={text!r}: a number of bytes is needed, '
                        "as '1GB' or '1G' (10^9), '1GiB' (2^30) or '4096'")
    return n


def physical_memory() -> int:
    """Bytes that this machine has; 0 where the system does not say."""
    try:
        return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    except (AttributeError, ValueError, OSError):
        return 0


def available_memory(root: Path = Path('/')) -> int:
    """Bytes that programs can still get without swapping: MemAvailable where there is /proc/meminfo, else all that the machine
    has; on Linux no more than the control groups of this process, as a container's, have left. 0 where the system says
    nothing. root: the folder that has proc/ and sys/.
    """
    try:
        lines = (root / 'proc/meminfo').read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith('MemAvailable:'))
    except (OSError, StopIteration, ValueError, IndexError):
        free = physical_memory()
    known = [n for n in (free, *(_left_in(*group) for group in _memory_groups(root))) if n]
    return min(known, default=0)


# a control group's files, of version 2 and 1: its limit, its use, and what part of it in memory.stat the kernel gives up
V2 = ('memory.max', 'memory.current', 'inactive_file')
V1 = ('memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file')


def _memory_groups(root):
    """(folder, V2 or V1) of this process's control group and of those around it, whose limits hold for it too. Not all exist:
    in a container the path may be the host's, and its own group is then what is mounted."""
    mounted = {'': (root / 'sys/fs/cgroup', V2), 'memory': (root / 'sys/fs/cgroup/memory', V1)}
    groups = set(mounted.values())
    try:
        entries = [line.split(':', 2) for line in (root / 'proc/self/cgroup').read_text().splitlines()]
    except OSError:
        entries = []
    for _, kinds, path in (entry for entry in entries if len(entry) == 3):
        for kind in {*kinds.split(',')} & mounted.keys():
            folder, files = mounted[kind]
            inner = Path(path.lstrip('/'))
            groups |= {(folder / part, files) for part in (inner, *inner.parents)}
    return groups


def _left_in(folder, files):
    """Bytes that a group may still take, at least 1; None where it has no limit, which version 1 writes as nearly 2^63."""
    limit, used, cache = files
    try:
        most, now = int((folder / limit).read_text()), int((folder / used).read_text())
    except (OSError, ValueError):  # no such group, or 'max'
        return None
    try:
        stat = dict(line.split() for line in (folder / 'memory.stat').read_text().splitlines())
        now -= int(stat.get(cache, 0))
    except (OSError, ValueError):
        pass
    return max(1, most - now) if most < 2 ** 60 else None


def nice_bytes(n: float) -> str:
    """1,048,576 -> '1.05 MB' (decimal units)."""
    for unit, size in (('TB', 1e12), ('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
        if n >= size:
            return f'{n / size:.3g} {unit}' if n < 1000 * size else f'{n / size:,.0f} {unit}'
    return f'{n:.0f} B'
