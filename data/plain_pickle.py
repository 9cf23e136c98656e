"""Check a pickle before it is loaded. A pickle is a program: even if it may not create any objects
of classes, a few hundred bytes of it can take hours, or all memory."""
import functools
import os
import pickle
import pickletools
import struct
import zipfile
from pathlib import Path

MAX_OPCODES = 750_000  # a vocabulary of 65,536 tokens takes 330,000
# Reading items of tuples counts as one each. Hashing a tuple reads all items of all tuples in it,
# and each level of [t, t] doubles their number.
MAX_WORK = 10_000_000
MAX_INT_BITS = 64  # larger ints can be chosen to have equal hashes, which makes a dict slow
DIRECTORY = 0x10  # an attribute of MS-DOS

MUTABLE = (pickletools.pydict, pickletools.pylist, pickletools.pyset)
GETS = {'GET', 'BINGET', 'LONG_BINGET'}
PUTS = {'PUT', 'BINPUT', 'LONG_BINPUT', 'MEMOIZE'}


@functools.lru_cache(maxsize=1)  # programs read a meta.pkl several times
def check_pickle(data: bytes) -> None:
    """Raise pickle.UnpicklingError if loading `data` might take long or much memory, ValueError or
    LookupError if it is damaged. Nothing is loaded."""
    stack, memo, work = [], {}, 0  # the number of items to read in order to hash each value
    for i, (op, arg, _) in enumerate(pickletools.genops(data)):
        name = op.name
        if type(arg) is int and arg.bit_length() > MAX_INT_BITS:
            raise pickle.UnpicklingError(f'it has an int of {arg.bit_length():,} bits')
        if name in GETS:
            stack.append(memo[arg])
        elif name in PUTS:
            arg = len(memo) if name == 'MEMOIZE' else arg
            if arg > i:  # loading allocates an array that long
                raise pickle.UnpicklingError('it has an index that is too large')
            memo[arg] = stack[-1]
        elif name == 'MARK':
            stack.append(None)
        elif not op.stack_before:
            stack += [1] * len(op.stack_after)
        else:
            read = _take(stack, op.stack_before)
            work += read
            mutable = op.stack_after and op.stack_after[-1] in MUTABLE
            stack += [1 if mutable else 1 + read] * len(op.stack_after)
        if i >= MAX_OPCODES or work > MAX_WORK:
            raise pickle.UnpicklingError('it is too large or too deeply nested')


def check_archive(path: Path) -> tuple[list[bytes], dict[str, int]]:
    """Return the pickles in a file of torch.save, and the sizes in bytes of all its entries. Raises
    an error, as `check_pickle` does, if loading the file might take long, or more memory than the
    file has bytes: its entries must be neither compressed nor overlap."""
    if not path.is_file():  # opening a FIFO would wait forever
        raise ValueError('it is not a regular file')
    if not zipfile.is_zipfile(path):
        raise ValueError('it is not a zip file, as torch.save writes')
    _check_end(path)
    with _opened(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError('it is compressed; torch.save does not compress')
        sizes = {entry.filename: entry.file_size for entry in entries}
        if sum(sizes.values()) > path.stat().st_size:
            raise ValueError('its entries are larger than the file')
        if any(entry.is_dir() or entry.external_attr & DIRECTORY for entry in entries):
            raise ValueError('it has a directory, for which torch would read nothing')
        if len(set(map(str.lower, sizes))) < len(entries):  # torch finds names in any case
            raise ValueError('two of its entries have the same name')
        pickles = [archive.read(name) for name in sizes if name.lower().endswith('.pkl')]
    for data in pickles:
        check_pickle(data)
    return pickles, sizes


def check_sums(path: Path) -> None:
    """Raise ValueError if an entry of a file of torch.save differs from its CRC-32, which torch
    writes but does not compare."""
    with _opened(path) as archive:
        if name := archive.testzip():
            raise ValueError(f'{name} in it is not what was written (its CRC-32 differs)')


def _opened(path):
    """The archive. After `torch.serialization.set_crc32_options(False)` all its sums are 0: then
    `zipfile` does not compare them."""
    archive = zipfile.ZipFile(path)
    if not any(entry.CRC for entry in archive.infolist()):
        for entry in archive.infolist():
            del entry.CRC
    return archive


def _check_end(path: Path) -> None:
    """Raise ValueError unless the list of entries ends where the zip file's end record begins. If
    it does not, torch and `zipfile` may read two different lists."""
    with open(path, 'rb') as file:
        n = file.seek(0, os.SEEK_END)
        file.seek(max(0, n - 98))
        tail = file.read().rjust(98, b'\0')
    record, locator, end = tail[:56], tail[56:76], tail[76:]
    begin, (size, offset) = n - len(end), struct.unpack('<LL', end[12:20])
    whole = end.startswith(b'PK\5\6') and end.endswith(b'\0\0')  # without a comment
    if locator.startswith(b'PK\6\7'):  # zip64
        begin, (size, offset) = n - len(tail), struct.unpack('<QQ', record[40:56])
        whole = whole and record.startswith(b'PK\6\6')
        whole = whole and struct.unpack('<Q', locator[8:16]) == (begin,)
    if not whole or offset + size != begin:
        raise ValueError('its list of entries is not at its end, as torch.save writes it')


def _take(stack: list, operands: list) -> int:
    """Remove what an opcode takes from the stack, a mark with all that follows it, and return the
    number of items to read in it."""
    read = 0
    if pickletools.markobject in operands:
        while (item := stack.pop()) is not None:
            read += item
        operands = operands[:operands.index(pickletools.markobject)]
    for _ in operands:
        read += stack.pop() or 0
    return read
