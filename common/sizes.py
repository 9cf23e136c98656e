"""Sizes in bytes: reading and printing them, and the machine's memory. No torch here."""
import os
import re
from decimal import Decimal

from common.errors import UserError

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


def nice_bytes(n: float) -> str:
    """1,048,576 -> '1.05 MB' (decimal units)."""
    for unit, size in (('TB', 1e12), ('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
        if n >= size:
            return f'{n / size:.3g} {unit}' if n < 1000 * size else f'{n / size:,.0f} {unit}'
    return f'{n:.0f} B'
