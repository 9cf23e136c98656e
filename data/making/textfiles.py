"""A dataset from any text files: find them, see which are text, split them, and write their tokens; memory is bounded.

Two passes over the files: the first finds what can be read, its length and its alphabet, the second writes tokens.
"""

import fnmatch
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from config.errors import UserError
from data.gpt2_bpe import gpt2_encoding
from data.long_texts import alphabet_meta, bpe_arrays, char_encoder
from data.making.writer import TokenWriter
from data.tokenfiles import split_files

NAMED = 3  # skipped files that are named, of all that are counted
BLOCK = 1 << 20  # characters read at a time
MADE_BY = 'data/text/prepare.py'
ENOUGH = 0.5  # of the share that val shall have: whole files for less are too little
FEWEST = 2  # tokens of a split: a character and what follows it


@dataclass(frozen=True)
class TextPart:
    """The characters [start, end) of a text file; `key`, its path within the folder given, decides its split."""
    path: Path
    key: str
    start: int
    end: int
    whole: bool = True

    def __len__(self) -> int:
        return self.end - self.start

    def blocks(self) -> Iterator[str]:
        """The text in pieces. UserError if the file is not as long as it was."""
        at = 0
        for block in read_blocks(self.path):
            piece = block[max(self.start - at, 0):max(self.end - at, 0)]
            at += len(block)
            if piece:
                yield piece
            if at >= self.end and not self.whole:
                return
        if at < self.end or (self.whole and at > self.end):
            raise UserError(f'{str(self.path)!r} changed while it was read: prepare again')


def read_blocks(path: Path, block: int = BLOCK) -> Iterator[str]:
    """The text of a UTF-8 file in pieces of at most `block` characters; line ends become '\\n', a byte order mark goes.

    UserError if the file cannot be read or is not UTF-8 (perhaps only after some pieces).
    """
    try:
        with open(path, encoding='utf-8-sig') as file:
            while text := file.read(block):
                yield text
    except UnicodeDecodeError as error:
        raise UserError(f'{str(path)!r} is not UTF-8 text ({error.reason})') from None
    except OSError as error:
        raise UserError(f'cannot read {str(path)!r}: {error.strerror}') from None


def check_name(name: str, root: Path, overwrite: bool = False) -> Path:
    """The folder `root/name`. UserError for a name that is no plain one, a folder with a program in it, such as those that
    come with nanoKV, and (but for `overwrite`) one with a dataset that text/prepare.py did not make."""
    if not re.fullmatch(r'[A-Za-z0-9][A-Za-z0-9_.-]{0,99}', name):
        raise UserError(f'name {name!r}: allowed are up to 100 letters, digits, "_", "-" and "."')
    folder = Path(root) / name
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise UserError(f'name {name!r}: data/{name} is no folder; allowed is a name that is not taken')
    programs = sorted(path.name for path in folder.glob('*.py'))
    if name != 'text' and programs:
        raise UserError(f'name {name!r}: data/{name}/ has a program of its own, {programs[0]!r}; '
                        'allowed is a name that is not taken')
    found = [*split_files(folder, 'train'), *split_files(folder, 'val'), *folder.glob('meta.pkl')]
    if found and not overwrite and not made_here(folder):
        raise UserError(f'name {name!r}: data/{name}/ holds {found[0].name!r}, which this program did not make; '
                        'allowed is a name that is not taken, or --overwrite')
    return folder


def made_here(folder: Path) -> bool:
    """Whether the dataset in `folder` is one of text/prepare.py, as its source.json says."""
    try:
        return json.loads((folder / 'source.json').read_text())['made_by'] == MADE_BY
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def find_files(inputs: list[Path], pattern: str) -> list[tuple[Path, str]]:
    """(path, key) of the files given, and of those below the folders given whose name matches `pattern`, each once.

    UserError for an input that does not exist, or if there is no file at all.
    """
    found: dict[Path, tuple[Path, str]] = {}
    for given in inputs:
        if os.path.isdir(given):
            files = [(path, path.relative_to(given).as_posix()) for path in _walk(given)
                     if fnmatch.fnmatch(path.name, pattern) or fnmatch.fnmatch(path.relative_to(given).as_posix(), pattern)]
        elif os.path.isfile(given):
            files = [(given, given.name)]
        else:
            raise UserError(f'input {str(given)!r} does not exist or is no file; allowed are files and folders')
        for path, key in files:
            found.setdefault(path.resolve(), (path, key))
    if not found:
        raise UserError(f'no file in {", ".join(repr(str(p)) for p in inputs)} matches --glob={pattern!r}')
    return list(found.values())


def scan(files: list[tuple[Path, str]], tokenizer: str = 'char') -> tuple[list[TextPart], set[str]]:
    """The files that are text, and (for the tokenizer 'char') all their characters.

    Says on stderr how many files were skipped, and why. UserError if none is left.
    """
    texts, alphabet, skipped = [], set(), {}
    for path, key in progress(files, 'reading', [_size(path) for path, _ in files]):
        length, reason, characters = 0, '', set()
        try:
            for block in read_blocks(path):
                if '\0' in block:
                    reason = 'it holds zero bytes'
                    break
                length += len(block)
                if tokenizer == 'char':
                    characters.update(block)
        except UserError as error:
            reason = str(error).removeprefix(f'{str(path)!r} is ')
        if reason or not length:
            skipped[path] = reason or 'it is empty'
        else:
            texts.append(TextPart(path, key, 0, length))
            alphabet |= characters
    if skipped:
        names = '; '.join(f'{str(path)!r}: {reason}' for path, reason in list(skipped.items())[:NAMED])
        more = f'; and {len(skipped) - NAMED:,} more' if len(skipped) > NAMED else ''
        print(f'skipped {len(skipped):,} of {len(files):,} files that are not text ({names}{more})', file=sys.stderr)
    if not texts:
        raise UserError(f'none of {len(files):,} files is text (UTF-8, not empty), e.g. {str(files[0][0])!r}')
    return texts, alphabet


def split(texts: list[TextPart], share: float) -> dict[str, list[TextPart]]:
    """{'train': parts, 'val': parts}: whole texts for val, or the tail of the largest one (see data/text/prepare.py).

    share: of the characters, for val. UserError if that leaves fewer than FEWEST characters on either side.
    """
    total = _characters(texts)
    chosen, room = set(), total * share
    for text in sorted(texts, key=lambda text: hashlib.sha256(text.key.encode()).digest()):
        if len(text) <= room and len(texts) > 1:
            chosen.add(text.path)
            room -= len(text)
    train = [text for text in texts if text.path not in chosen]
    val = [text for text in texts if text.path in chosen]
    if _characters(val) < ENOUGH * total * share:
        largest = max(texts, key=len)
        cut = min(max(len(largest) - (total - int(total * (1 - share))), FEWEST), len(largest))
        train = [replace(text, end=cut, whole=False) if text is largest else text for text in texts]
        val = [replace(largest, start=cut)]
    sizes = {'train': _characters(train), 'val': _characters(val)}
    if min(sizes.values()) < FEWEST:
        raise UserError(f'too little text: {total:,} characters leave {sizes["train"]:,} for train and {sizes["val"]:,} '
                        f'for val with --val={share}; allowed are at least {FEWEST} each')
    return {'train': train, 'val': val}


def prepare(folder: Path, parts: dict[str, list[TextPart]], alphabet: set[str] | None, settings: dict | None = None) -> None:
    """Write the dataset: characters of `alphabet`, or GPT-2 BPE if that is None. Prints nanoGPT's lines.

    settings: what source.json shall tell besides which program made it.
    """
    texts = [(name, part) for name in parts for part in parts[name]]
    several = len({part.path for _, part in texts}) > 1
    print(f'length of dataset in characters: {sum(len(part) for _, part in texts):,}')
    if alphabet is None:
        meta, encoding = None, gpt2_encoding()
        arrays, after = partial(bpe_arrays, encoding), np.array([encoding.eot_token])
    else:
        meta = alphabet_meta(alphabet | {'\n'} if several else alphabet)
        arrays, newline = partial(map, char_encoder(meta['stoi'])), meta['stoi'].get('\n')
        print(f'vocab size: {meta["vocab_size"]:,}')
    with TokenWriter(folder, meta, source={'made_by': MADE_BY, **(settings or {})}) as out:
        for name, part in progress(texts, 'writing', [len(part) for _, part in texts]):
            last = None
            for ids in arrays(part.blocks()):
                out.add(name, ids)
                last = ids[-1]
            if several:
                if alphabet is not None:
                    after = np.full(2 if last == newline else 3, newline)
                out.add(name, after)
    for name in parts:
        print(f'{name} has {out.tokens[name]:,} tokens')


def progress(items: list, words: str, sizes: list[int]) -> Iterable:
    """Go through `items`; a bar on stderr, if that is a terminal, advances by their sizes."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(words, total=sum(sizes))
        for item, size in zip(items, sizes, strict=True):
            yield item
            bar.update(task, advance=size)


def _walk(folder: Path) -> list[Path]:
    """All files below `folder` but hidden ones, sorted by path; links to folders are not followed.

    Says on stderr how many folders cannot be read.
    """
    files, errors = [], []
    for here, folders, names in os.walk(folder, onerror=errors.append):
        folders[:] = [name for name in folders if not name.startswith('.')]
        files += [Path(here) / name for name in names if not name.startswith('.')]
    if errors:
        names = '; '.join(f'{error.filename!r}: {error.strerror}' for error in errors[:NAMED])
        more = f'; and {len(errors) - NAMED:,} more' if len(errors) > NAMED else ''
        print(f'skipped {len(errors):,} folders that cannot be read ({names}{more})', file=sys.stderr)
    return sorted((path for path in files if os.path.isfile(path)), key=lambda path: path.relative_to(folder).as_posix())


def _characters(parts: list[TextPart]) -> int:
    return sum(len(part) for part in parts)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
