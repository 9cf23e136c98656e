"""Check a pickle before it is loaded. A pickle is a program: even if it may not create any objects
of classes, a few hundred bytes of it can take hours, or all memory."""
import functools
import pickle
import pickletools
import zipfile
from pathlib import Path

MAX_OPCODES = 750_000  # a vocabulary of 65,536 tokens takes 330,000
# Hashing a tuple reads all items of all tuples in it; each level of [t, t] doubles their number.
MAX_REPEATED = 100_000  # the product of the numbers of times that tuples are used
MAX_INT_BITS = 64  # larger ints can be chosen to have equal hashes, which makes a dict slow
DIRECTORY = 0x10  # an attribute of MS-DOS

# opcodes that take values from the stack, and leave a new one that is no tuple
NO_TUPLE = {'REDUCE', 'BINPERSID', 'STACK_GLOBAL', 'NEWOBJ', 'LIST', 'DICT'}


@functools.lru_cache(maxsize=1)  # programs read a meta.pkl several times
def check_pickle(data: bytes) -> None:
    """Raise pickle.UnpicklingError if loading `data` might take long or much memory, ValueError or
    LookupError if it is damaged. Nothing is loaded."""
    uses, repeated, may_be_tuple = {}, 1, False  # uses: index in the memo -> of a tuple, or 0
    for i, (op, arg, _) in enumerate(pickletools.genops(data)):
        if type(arg) is int and arg.bit_length() > MAX_INT_BITS:
            raise pickle.UnpicklingError(f'it has an int of {arg.bit_length():,} bits')
        if op.name.endswith(('PUT', 'MEMOIZE')):
            arg = len(uses) if op.name == 'MEMOIZE' else arg
            if arg > i:  # loading allocates an array that long
                raise pickle.UnpicklingError('it has an index that is too large')
            uses[arg] = 1 if may_be_tuple else 0
        elif op.name.endswith('GET'):
            may_be_tuple = uses[arg] > 0
            if may_be_tuple:
                repeated = repeated // uses[arg] * (uses[arg] + 1)
                uses[arg] += 1
        elif op.name not in ('PROTO', 'FRAME'):
            may_be_tuple = bool(op.stack_before) and op.name not in NO_TUPLE
        if i >= MAX_OPCODES or repeated > MAX_REPEATED or op.name == 'DUP':
            raise pickle.UnpicklingError('it is too large or too deeply nested')


def check_archive(path: Path) -> tuple[list[bytes], dict[str, int]]:
    """Return the pickles in a file of torch.save, and the sizes in bytes of all its entries. Raises
    an error, as `check_pickle` does, if loading the file might take long, or more memory than the
    file has bytes: its entries must be neither compressed nor overlap."""
    if not path.is_file():  # opening a FIFO would wait forever
        raise ValueError('it is not a regular file')
    if not zipfile.is_zipfile(path):
        raise ValueError('it is not a zip file, as torch.save writes')
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
    """Raise ValueError if an entry differs from its CRC-32, which torch does not compare."""
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
