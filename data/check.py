"""Notice damage to a data set's files by their checksums (CRC-32).

    python -m data.check shakespeare_bpe    # all files of data/shakespeare_bpe

A preparation writes the checksums to checksums.json. Programs check meta.pkl whenever they read
it, and a split of at most 256 MB whenever they open it. This program checks files of any size.
"""
from config import startup  # noqa: F401  # isort: skip  (before torch is imported)
import argparse
import json
import os
import zlib
from pathlib import Path
from typing import BinaryIO

import rich.progress
from rich.console import Console

from config.errors import UserError
from config.files import read_json
from configurator import run_program

CHECKSUMS = 'checksums.json'
MAX_BYTES = 256 * 2**20  # of a split that is checked when it is opened; it takes up to 0.25 s


def write_checksums(folder: Path) -> None:
    """Write the checksums of the data set in `folder` to checksums.json there."""
    known = {}
    for path in data_files(folder):
        with open(path, 'rb') as file:
            known[path.name] = checksum(file)
    (folder / CHECKSUMS).write_text(json.dumps(known, indent=1))


def data_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob('*.bin'), *folder.glob('meta.pkl')])


def checksum(file: BinaryIO) -> int:
    crc = 0
    while data := file.read(2**20):
        crc = zlib.crc32(data, crc)
    return crc


def read_checksums(folder: Path) -> dict[str, int]:
    """Return {name of a file: its CRC-32}, {} if there is no checksums.json, as in nanoGPT's data
    sets. Raises UserError if it is damaged."""
    path = folder / CHECKSUMS
    try:
        known = read_json(path)
        if all(type(crc) is int and os.path.basename(name) == name for name, crc in known.items()):
            return known
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, AttributeError):
        pass
    raise UserError(f'{str(path)!r} is damaged: prepare the data set again, or delete that file '
                    'to use the data set unchecked')


def compare(path: Path, crc: int, known: dict[str, int]) -> None:
    """Raise UserError if a file with checksum `crc` has another one in `known`."""
    if crc != known.get(path.name, crc):
        raise UserError(f'{str(path)!r} is not the file that was prepared, by its checksum: if it '
                        'is damaged, prepare the data set again; if you replaced it, delete '
                        f'{str(path.with_name(CHECKSUMS))!r}')


def check_files(paths: list[Path]) -> None:
    """Raise UserError if one of a split's files is damaged. More than MAX_BYTES are not read."""
    known = read_checksums(paths[0].parent)
    if known and sum(path.stat().st_size for path in paths) <= MAX_BYTES:
        for path in paths:
            check_file(path, known)


def check_file(path: Path, known: dict[str, int], progress: bool = False) -> None:
    console = Console(stderr=True)
    try:
        with rich.progress.open(path, 'rb', description=path.name, console=console, transient=True,
                                disable=not (progress and console.is_terminal)) as file:
            crc = checksum(file)
    except OSError as e:
        raise UserError(f'{str(path)!r} cannot be read: {e.strerror}') from e
    compare(path, crc, known)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m data.check', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('name', metavar='NAME', help='folder under data/, or an absolute path')
    folder = Path(__file__).resolve().parent / parser.parse_args(argv).name
    known, files = read_checksums(folder), data_files(folder)
    if not files:
        raise UserError(f'{str(folder)!r} has no files of a data set')
    for path in sorted({*files, *(folder / name for name in known)}):
        if path.name not in known:
            print(f'{path.name}: there is no checksum to compare it with')
            continue
        if not path.is_file():
            raise UserError(f'{str(path)!r} is missing: prepare the data set again')
        check_file(path, known, progress=True)
        print(f'{path.name}: as it was prepared')


if __name__ == '__main__':
    run_program(main)
