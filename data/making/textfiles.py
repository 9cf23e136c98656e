"""Make a dataset from text files: find and split them, and write their tokens."""
import fnmatch
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError
from common.files import read_text
from data.bpe import learn_bpe
from data.making.writer import TokenWriter
from data.progress import tracked
from data.tokenizer import alphabet_meta, load_tokenizer

NAMED = 3  # how many of the skipped files are listed by name
MOST_SHOWN = 1000  # characters of an alphabet
BLOCK = 1 << 20  # characters encoded, or learned from, at a time
ENOUGH = 0.5  # fraction of val's share that entire files must reach
FEWEST = 2  # characters per split: an input and its target


def check_name(name: str, root: Path, overwrite: bool) -> Path:
    """Return the folder `root/name`. Raises UserError for an invalid name, and, unless it is the
    program's own (text), for a folder that has a program, or a dataset without `overwrite`."""
    if not re.fullmatch(r'[A-Za-z0-9][A-Za-z0-9_.-]{0,99}', name):
        raise UserError(f'name {name!r}: allowed are up to 100 letters, digits, "_", "-" and "."')
    folder = root / name
    if name == 'text':
        return folder
    if programs := sorted(folder.glob('*.py')):
        raise UserError(f'name {name!r}: data/{name}/ has a program of its own, '
                        f'{programs[0].name!r}; allowed is a name that is not taken')
    found = [*folder.glob('*.bin'), *folder.glob('meta.pkl')]
    if found and not overwrite:
        raise UserError(f'name {name!r}: data/{name}/ has {found[0].name!r} already; allowed is a '
                        'name that is not taken, or --overwrite')
    return folder


def find_files(inputs: list[Path], pattern: str) -> list[Path]:
    """Return the given files, and those of given folders that match `pattern` and are not hidden,
    in the order of their paths in it, each once. UserError: if an input or all are missing."""
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


def _walk(folder: Path) -> Iterator[Path]:
    def skip(error):
        print(f'skipped folder {error.filename!r}: {error.strerror}', file=sys.stderr)

    for here, folders, names in os.walk(folder, onerror=skip):
        folders[:] = [name for name in folders if not name.startswith('.')]
        paths = (Path(here) / name for name in names if not name.startswith('.'))
        yield from filter(os.path.isfile, paths)


def read_texts(files: list[Path]) -> list[str]:
    """Return the texts of the files that are text, equal ones once. Reports skipped files on
    stderr. Raises UserError if none is text."""
    paths, skipped = {}, []  # text -> its first file
    for path in tracked(files, 'reading'):
        try:
            text = read_text(path, repr(str(path)))
        except UserError as error:
            skipped.append(str(error))
            continue
        if '\0' in text or not text:
            skipped.append(f'{str(path)!r} {"has zero bytes" if text else "is empty"}')
        elif paths.setdefault(text, path) != path:
            skipped.append(f'{str(path)!r} is equal to {str(paths[text])!r}')
    if skipped:
        rest = '; ...' if len(skipped) > NAMED else ''
        print(f'skipped {len(skipped):,} of {len(files):,} files: {"; ".join(skipped[:NAMED])}'
              f'{rest}', file=sys.stderr)
    if not paths:
        raise UserError(f'none of {len(files):,} files is text (UTF-8, not empty), '
                        f'e.g. {str(files[0])!r}')
    return list(paths)


def split(texts: list[str], share: float) -> dict[str, list[str]]:
    """Return {'train': texts, 'val': texts}, split as described in data/text/prepare.py.
    share: val's fraction of characters. UserError if a split has fewer than FEWEST characters.
    """
    total, chosen = sum(map(len, texts)), set()
    room = total * share
    for text in sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest()):
        if len(text) <= room and len(texts) > 1:
            chosen.add(text)
            room -= len(text)
    splits = {'train': [text for text in texts if text not in chosen],
              'val': [text for text in texts if text in chosen]}
    if room > (1 - ENOUGH) * total * share:
        largest = max(texts, key=len)
        cut = max(len(largest) - total + int(total * (1 - share)), FEWEST)
        splits = {'train': [text[:cut] if text is largest else text for text in texts],
                  'val': [largest[cut:]]}
    n_train, n_val = (sum(map(len, part)) for part in splits.values())
    if min(n_train, n_val) < FEWEST:
        raise UserError(f'too little text: {total:,} characters leave {n_train:,} for train and '
                        f'{n_val:,} for val with --val={share}; '
                        f'allowed are at least {FEWEST} each')
    return splits


def prepare(folder: Path, splits: dict[str, list[str]], name: str, several: bool) -> dict[str, int]:
    """Write the dataset, and return the number of tokens of each split. Prints nanoGPT's lines.
    name: the tokenizer's, see data/text/prepare.py. several: texts end with its token for that."""
    texts = [(split, text) for split, part in splits.items() for text in part]
    print(f'length of dataset in characters: {sum(len(text) for _, text in texts):,}')
    meta = None  # GPT-2's
    if name == 'char':
        meta = alphabet_meta(set().union(*(text for _, text in texts)))
        print(f'all the unique characters: {"".join(meta["stoi"])[:MOST_SHOWN]!r}')
    elif name != 'gpt2':
        train = tracked(splits['train'], 'learning tokens')
        meta = learn_bpe((piece for text in train for piece in pieces(text)),
                         int(name.removeprefix('bpe:')))
    tokenizer = load_tokenizer(meta)
    print(f'vocab size: {tokenizer.vocab_size:,}')
    with TokenWriter(folder, meta) as out:
        for split, text in tracked(texts, 'writing'):
            for piece in pieces(text):
                out.add(split, tokenizer.encode(piece, special=False))
            if several and tokenizer.end_of_text is not None:
                out.add(split, [tokenizer.end_of_text])
    return out.tokens


def pieces(text: str, least: int = BLOCK, most: int = BLOCK) -> Iterator[str]:
    """Yield pieces of more than `least` characters, which are joined the text. GPT-2's words start
    at a blank after a visible character: cut there, the ids are those of the entire text. Without
    such a blank in the next `most` characters, it is cut after these."""
    pattern = r'(?s).{1,%d}(?:.{0,%d}?\S(?=[ \n])|.{0,%d})' % (least, most, most)
    return (match[0] for match in re.finditer(pattern, text))
