"""Sizes in bytes, as people write them. No torch here."""
import os
import re
from decimal import Decimal

from config.errors import UserError

UNITS = {'': 1, 'B': 1, 'KB': 10 ** 3, 'MB': 10 ** 6, 'GB': 10 ** 9, 'TB': 10 ** 12,
         'KIB': 2 ** 10, 'MIB': 2 ** 20, 'GIB': 2 ** 30, 'TIB': 2 ** 40}


def parse_bytes(text: str, name: str = 'budget') -> int:
    """'1GB' -> 1_000_000_000, '512MiB' -> 536_870_912, '4096' -> 4096. `name` is the key's, for the message.

    Raises:
        UserError: something else, or less than a byte.
    """
    match = re.fullmatch(r'\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*', text)
    n = int(Decimal(match[1]) * UNITS.get(match[2].upper(), 0)) if match else 0  # Decimal: not a byte lost to rounding
    if n < 1:
        raise UserError(f"{name}={text!r}: a number of bytes is needed, as '1GB', '512MiB' or '4096'")
    return n


def physical_memory() -> int:
    """Bytes that this machine has; 0 where the system does not say."""
    try:
        return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    except (AttributeError, ValueError, OSError):
        return 0


def available_memory() -> int:
    """Bytes that programs can still get without swapping: MemAvailable where there is /proc/meminfo, else all that the machine
    has; 0 where the system says neither."""
    try:
        with open('/proc/meminfo') as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith('MemAvailable:'))
    except (OSError, StopIteration, ValueError, IndexError):
        return physical_memory()
