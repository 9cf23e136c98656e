"""Notice damage to a data set's files by their checksums (CRC-32).

    python -m data.check shakespeare_bpe    # all files of data/shakespeare_bpe

A preparation writes the checksums to checksums.json. Programs check meta.pkl whenever they read
it, and a split of at most 256 MB whenever they open it. This program checks files of any size.
"""
from common import startup  # noqa: F401  # isort: skip  (before torch is imported)
import json
import os
import zlib
from pathlib import Path

from common.errors import UserError
from common.files import read_bytes
from configurator import run_program
from data.making.script import Arguments

CHECKSUMS = 'checksums.json'
MAX_JSON_BYTES = 2**20  # of checksums.json
MAX_BYTES = 256 * 2**20  # of a split that is checked when it is opened; it takes up to 0.25 s


def write_checksums(folder: Path) -> None:
    """Write the checksums of the data set in `folder` to checksums.json there."""
    known = {path.name: checksum(path) for path in data_files(folder)}
    (folder / CHECKSUMS).write_text(json.dumps(known, indent=1))


def data_files(folder: Path) -> list[Path]:
    return [*folder.glob('*.bin'), *folder.glob('meta.pkl')]


def checksum(path: Path) -> int:
    crc = 0
    try:
        with open(path, 'rb') as file:
            while data := file.read(2**20):
                crc = zlib.crc32(data, crc)
    except OSError as e:
        raise UserError(f'{str(path)!r} cannot be read: {e.strerror}') from e
    return crc


def read_checksums(folder: Path) -> dict[str, int]:
    """Return {name of a file: its CRC-32}, {} if there is no checksums.json, as in nanoGPT's data
    sets. Raises UserError if it is damaged."""
    path = folder / CHECKSUMS
    try:
        known = json.loads(read_bytes(path, MAX_JSON_BYTES))
        if all(type(crc) is int and os.path.basename(name) == name for name, crc in known.items()):
            return known
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, AttributeError, RecursionError):
        pass
    raise UserError(f'{str(path)!r} is damaged: prepare the data set again, or delete that file '
                    'to use the data set unchecked')


def compare(path: Path, crc: int, known: dict[str, int]) -> None:
    """Raise UserError if a file with checksum `crc` has another one in `known`, or none although
    other files have one: the name may be damaged, too."""
    if known and crc != known.get(path.name):
        raise UserError(f'{str(path)!r} is not the file that was prepared, by its checksum: if it '
                        'is damaged, prepare the data set again; if you replaced it, delete '
                        f'{str(path.with_name(CHECKSUMS))!r}')


def check_files(paths: list[Path]) -> None:
    """Raise UserError if one of a split's files is damaged. More than MAX_BYTES are not read."""
    known = read_checksums(paths[0].parent)
    if known and sum(path.stat().st_size for path in paths) <= MAX_BYTES:
        for path in paths:
            compare(path, checksum(path), known)


def main(argv: list[str] | None = None) -> None:
    parser = Arguments(__doc__, prog='python -m data.check')
    parser.add_argument('name', metavar='NAME', help='folder under data/, or an absolute path')
    folder = Path(__file__).resolve().parent / parser.parse_args(argv).name
    known = read_checksums(folder)
    files = sorted({*data_files(folder), *(folder / name for name in known)})
    if not files:
        raise UserError(f'{str(folder)!r} has no files of a data set')
    for path in files:
        compare(path, checksum(path), known)
        print(f'{path.name}: {"as it was prepared" if known else "it has no checksum"}')


if __name__ == '__main__':
    run_program(main)
