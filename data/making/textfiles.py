"""Make a dataset from text files: find and split them, and write tokens in bounded memory.

The files are read twice: first for their lengths and their alphabet, then to write the tokens.
"""

import fnmatch
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.progress import Progress

from config.errors import UserError
from config.files import read_json
from data.bpe import bpe_of
from data.download import progress_bar
from data.long_texts import alphabet_meta, bpe_arrays, char_encoder
from data.making.writer import TokenWriter
from data.tokenfiles import split_files

NAMED = 3  # how many of the skipped files are listed by name
BLOCK = 1 << 20  # characters read at a time
MADE_BY = 'data/text/prepare.py'
ENOUGH = 0.5  # fraction of val's share that entire files must reach
FEWEST = 2  # characters per split: an input and its target


@dataclass(frozen=True)
class TextPart:
    """Characters [start, end) of a text file. `digest`, of its text, determines the split."""
    path: Path
    digest: bytes
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def blocks(self) -> Iterator[str]:
        """Yield the text in pieces. UserError if the file has become shorter."""
        at = 0
        for block in read_blocks(self.path):
            piece = block[max(self.start - at, 0):max(self.end - at, 0)]
            at += len(block)
            if piece:
                yield piece
            if at >= self.end:
                return
        raise UserError(f'{str(self.path)!r} changed while it was read: prepare again')


def read_blocks(path: Path, block: int = BLOCK, *, by_line: bool = False) -> Iterator[str]:
    """Yield the text of a UTF-8 file in pieces of at most `block` characters, or by line. Line ends
    become '\\n', or go by line; a byte order mark is dropped. UserError if the file cannot be read
    or is not UTF-8 (possibly after some pieces)."""
    try:
        with open(path, encoding='utf-8-sig', newline='\n' if by_line else None) as file:
            yield from ((line.rstrip('\r\n') for line in file) if by_line else
                        iter(partial(file.read, block), ''))
    except UnicodeDecodeError as error:
        raise UserError(f'{str(path)!r} is not UTF-8 text ({error.reason})') from None
    except OSError as error:
        raise UserError(f'cannot read {str(path)!r}: {error.strerror}') from None


def check_name(name: str, root: Path, overwrite: bool) -> Path:
    """Return the folder `root/name`. Raises UserError for an invalid name, a folder that contains a
    program (like nanoKV's own), and, unless `overwrite`, one whose dataset is not `made_here`."""
    if not re.fullmatch(r'[A-Za-z0-9][A-Za-z0-9_.-]{0,99}', name):
        raise UserError(f'name {name!r}: allowed are up to 100 letters, digits, "_", "-" and "."')
    folder = root / name
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise UserError(f'name {name!r}: data/{name} is no folder; '
                        'allowed is a name that is not taken')
    programs = sorted(path.name for path in folder.glob('*.py'))
    if name != 'text' and programs:
        raise UserError(f'name {name!r}: data/{name}/ has a program of its own, {programs[0]!r}; '
                        'allowed is a name that is not taken')
    found = [*split_files(folder, 'train'), *split_files(folder, 'val'), *folder.glob('meta.pkl')]
    if found and not overwrite and not made_here(folder):
        raise UserError(f'name {name!r}: data/{name}/ holds {found[0].name!r}, which this program '
                        'did not make; allowed is a name that is not taken, or --overwrite')
    return folder


def made_here(folder: Path) -> bool:
    """Return whether text/prepare.py made the dataset in `folder`, going by source.json."""
    try:
        return read_json(folder / 'source.json')['made_by'] == MADE_BY
    except (OSError, ValueError, KeyError, TypeError):
        return False


def find_files(inputs: list[Path], pattern: str) -> list[Path]:
    """Return the given files, and those of given folders that match `pattern`, in the order of
    their paths in it, each once. Raises UserError for a missing input, or if there are no files."""
    found: dict[Path, Path] = {}
    for given in inputs:
        if os.path.isdir(given):
            files = [path for path in _walk(given) if fnmatch.fnmatch(path.name, pattern)
                     or fnmatch.fnmatch(path.relative_to(given).as_posix(), pattern)]
        elif os.path.isfile(given):
            files = [given]
        else:
            raise UserError(f'input {str(given)!r} does not exist or is no file; '
                            'allowed are files and folders')
        for path in sorted(files, key=Path.as_posix):
            found.setdefault(path.resolve(), path)
    if not found:
        names = ', '.join(repr(str(path)) for path in inputs)
        raise UserError(f'no file in {names} matches --glob={pattern!r}')
    return list(found.values())


def scan(files: list[Path]) -> tuple[list[TextPart], set[str]]:
    """Return the files that are text, and the set of their characters. Reports skipped files on
    stderr. Raises UserError if none is text."""
    texts, alphabet, skipped = [], set(), {}
    for path in tracked(files, 'reading'):
        length, characters, digest = 0, set(), hashlib.sha256()
        try:
            for block in read_blocks(path):
                length += len(block)
                characters.update(block)
                digest.update(block.encode())
        except UserError as error:
            skipped[path] = str(error).removeprefix(f'{str(path)!r} is ')
            continue
        if '\0' in characters or not length:
            skipped[path] = 'it holds zero bytes' if length else 'it is empty'
        else:
            texts.append(TextPart(path, digest.digest(), 0, length))
            alphabet |= characters
    if skipped:
        _report(f'{len(skipped):,} of {len(files):,} files that are not text', skipped)
    if not texts:
        raise UserError(f'none of {len(files):,} files is text (UTF-8, not empty), '
                        f'e.g. {str(files[0])!r}')
    return texts, alphabet


def split(texts: list[TextPart], share: float) -> dict[str, list[TextPart]]:
    """Return {'train': parts, 'val': parts}, split as described in data/text/prepare.py.
    share: val's fraction of characters. UserError if a split has fewer than FEWEST characters.
    """
    total = sum(map(len, texts))
    copies: dict[bytes, list[TextPart]] = {}  # equal files are in one split
    for text in texts:
        copies.setdefault(text.digest, []).append(text)
    chosen, room = set(), total * share
    for digest, equal in sorted(copies.items()):
        size = sum(map(len, equal))
        if size <= room and len(copies) > 1:
            chosen.add(digest)
            room -= size
    train = [text for text in texts if text.digest not in chosen]
    val = [text for text in texts if text.digest in chosen]
    if sum(map(len, val)) < ENOUGH * total * share:
        largest = max(texts, key=len)
        equal = copies[largest.digest]
        cut = len(largest) - (total - int(total * (1 - share))) // len(equal)
        cut = min(max(cut, FEWEST), len(largest))
        train = [replace(text, end=cut) if text in equal else text for text in texts]
        val = [replace(text, start=cut) for text in equal]
    n_train, n_val = sum(map(len, train)), sum(map(len, val))
    if min(n_train, n_val) < FEWEST:
        raise UserError(f'too little text: {total:,} characters leave {n_train:,} for train and '
                        f'{n_val:,} for val with --val={share}; '
                        f'allowed are at least {FEWEST} each')
    return {'train': train, 'val': val}


def prepare(folder: Path, parts: dict[str, list[TextPart]], tokenizer: str, alphabet: set[str],
            settings: dict) -> dict[str, int]:
    """Write the dataset, and return the number of tokens of each split. Prints nanoGPT's lines.
    tokenizer: see data/text/prepare.py; 'char' has `alphabet`. `settings` go into source.json."""
    texts = [(name, part) for name in parts for part in parts[name]]
    several = len({part.path for _, part in texts}) > 1
    print(f'length of dataset in characters: {sum(len(part) for _, part in texts):,}')
    if tokenizer == 'char':
        meta = alphabet_meta(alphabet | {'\n'} if several else alphabet)
        arrays, newline = partial(map, char_encoder(meta['stoi'])), meta['stoi'].get('\n')
    else:
        train = tracked(parts['train'], 'learning tokens')
        meta, encoding = bpe_of(tokenizer, (block for part in train for block in part.blocks()))
        arrays, after = partial(bpe_arrays, encoding), np.array([encoding.eot_token])
    if meta:
        print(f'vocab size: {meta["vocab_size"]:,}')
    with TokenWriter(folder, meta, source={'made_by': MADE_BY, **settings}) as out:
        for name, part in tracked(texts, 'writing'):
            for ids in arrays(part.blocks()):
                out.add(name, ids)
            if several and tokenizer == 'char':
                after = np.full(2 if ids[-1] == newline else 3, newline)
            if several:
                out.add(name, after)
    return out.tokens


def tracked(files: list, description: str) -> Iterator:
    """Iterate over `files` with a progress bar."""
    with progress_bar(*Progress.get_default_columns()) as bar:
        yield from bar.track(files, description=description)


def _walk(folder: Path) -> list[Path]:
    """Return all non-hidden files below `folder`; report unreadable folders on stderr."""
    files, errors = [], []
    for here, folders, names in os.walk(folder, onerror=errors.append):
        folders[:] = [name for name in folders if not name.startswith('.')]
        files += [Path(here) / name for name in names if not name.startswith('.')]
    if errors:
        reasons = {error.filename: error.strerror for error in errors}
        _report(f'{len(errors):,} folders that cannot be read', reasons)
    return [path for path in files if os.path.isfile(path)]


def _report(what: str, reasons: dict[Path | str, str]) -> None:
    named = '; '.join(f'{str(path)!r}: {reason}' for path, reason in list(reasons.items())[:NAMED])
    more = f'; and {len(reasons) - NAMED:,} more' if len(reasons) > NAMED else ''
    print(f'skipped {what} ({named}{more})', file=sys.stderr)
