"""Sizes in bytes, as people write them. No torch here."""
import re
from decimal import Decimal

from config.errors import UserError

UNITS = {'': 1, 'B': 1, 'KB': 10 ** 3, 'MB': 10 ** 6, 'GB': 10 ** 9, 'TB': 10 ** 12,
         'KIB': 2 ** 10, 'MIB': 2 ** 20, 'GIB': 2 ** 30, 'TIB': 2 ** 40}


def parse_bytes(text: str) -> int:
    """'1GB' -> 1_000_000_000, '512MiB' -> 536_870_912, '4096' -> 4096.

    Raises:
        UserError: something else, or less than a byte.
    """
    match = re.fullmatch(r'\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*', text)
    n = int(Decimal(match[1]) * UNITS.get(match[2].upper(), 0)) if match else 0  # Decimal: not a byte lost to rounding
    if n < 1:
        raise UserError(f"budget={text!r}: a number of bytes is needed, as '1GB', '512MiB' or '4096'")
    return n
