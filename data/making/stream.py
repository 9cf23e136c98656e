"""Datasets too big for memory: documents from the Hugging Face hub or files, written in shards.

A hash of its text decides whether a document is held out for validation: every run makes the same
choice without knowing the number of documents, and duplicates end up in the same split.
"""
import hashlib
import itertools
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import TimeElapsedColumn

from common.errors import UserError
from data.bpe import encode_documents, gpt2_encoding, valid_text
from data.download import check_hub
from data.making.script import Arguments, fraction, whole
from data.making.writer import TokenWriter
from data.progress import progress_bar

BATCH = 1 << 20  # characters that a thread encodes at a time


def arguments(doc: str, script: str) -> Arguments:
    """Return the command line for a streamed dataset's prepare.py, given its doc and `__file__`."""
    parser = Arguments(doc, script)
    parser.add_argument('--from', dest='files', type=Path, nargs='+', metavar='FILE',
                        help='read documents from files instead: .jsonl (a "text" per line), '
                             '.txt (a document per line), .parquet (a column "text")')
    parser.add_argument('--max_tokens', type=whole, metavar='N',
                        help='stop after this many train tokens (default: all)')
    parser.add_argument('--val', type=fraction, default=0.0005, metavar='SHARE',
                        help='share of the documents held out (default: 0.0005)')
    parser.add_argument('--shard_tokens', type=whole, default=100_000_000, metavar='N',
                        help='tokens per train file (default: 100,000,000, which are 200 MB)')
    parser.add_argument('--workers', type=whole, default=max(1, (os.cpu_count() or 2) - 1),
                        metavar='N', help='threads that encode (default: one per core but one)')
    return parser


def prepare(args: Any, path: str, **options: Any) -> None:
    """Make the dataset described by `args` (see arguments()) from the hub dataset `path`. options:
    of datasets.load_dataset. UserError: as TokenWriter's, or if documents are not available."""
    documents = file_documents(args.files) if args.files else hub_documents(path, **options)
    arrays = encoded(batches(documents), gpt2_encoding(), args.val, args.workers)
    with TokenWriter(args.out, None, args.shard_tokens) as out:
        with progress_bar('{task.completed:,} tokens', TimeElapsedColumn()) as bar:
            task = bar.add_task('')
            for train, val in arrays:
                left = args.max_tokens and args.max_tokens - out.tokens['train']
                out.add('train', train[:left])
                out.add('val', val)
                bar.update(task, completed=out.tokens.total())
                if left is not None and len(train) >= left:
                    break
        for split in ('train', 'val'):
            if not out.tokens[split]:
                raise UserError(f'none of the documents is for {split} with --val={args.val}; '
                                'allowed are more documents or another share')


def batches(documents: Iterable[str], characters: int = BATCH) -> Iterator[list[str]]:
    """Yield lists of documents of at least `characters` characters, except for the last one."""
    batch, size = [], 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= characters or len(batch) >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_batch(texts: list[str], encoding: Any, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Encode each document followed by <|endoftext|>, except empty ones. Returns the tokens for
    train and those for validation (a `share` of all hashes)."""
    train, val = [], []
    for text in filter(None, map(valid_text, texts)):
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        held_out = int.from_bytes(digest, 'big') < share * 2**64
        (val if held_out else train).append(text)
    return encode_documents(encoding, train), encode_documents(encoding, val)


def encoded(texts: Iterable[list[str]], encoding: Any, share: float,
            workers: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield encode_batch of each batch in order, with `workers` threads, each two batches ahead."""
    pending = deque()
    with ThreadPoolExecutor(workers) as pool:
        for batch in texts:
            pending.append(pool.submit(encode_batch, batch, encoding, share))
            if len(pending) >= 2 * workers:
                yield pending.popleft().result()
        for future in pending:
            yield future.result()


def file_documents(files: list[Path]) -> Iterator[str]:
    """Return the documents of these files. Raises UserError if one is missing or of another kind,
    before anything is read; read errors are UserErrors, too."""
    for path in files:
        if path.suffix not in READERS:
            raise UserError(f'{str(path)!r}: allowed are .jsonl, .txt and .parquet files')
        if not os.path.isfile(path):
            raise UserError(f'no file {str(path)!r}')
    return itertools.chain.from_iterable([READERS[path.suffix](path) for path in files])


def load_dataset() -> Callable:
    """Return datasets.load_dataset. Raises UserError for versions below 4, which run programs from
    the hub's repositories, or ask for permission to."""
    try:
        import datasets
        version = datasets.__version__
    except ImportError:
        version = 'none'
    if not re.match(r'[4-9]|\d\d', version):
        raise UserError(f'this needs the package datasets in version 4 or newer, and {version} is '
                        "installed: `pip install -U 'datasets>=4'` (or --from=FILE.jsonl)")
    return datasets.load_dataset


def hub_documents(path: str, **options: Any) -> Iterator[str]:
    """Return column 'text' of the 'train' split of a hub dataset. options: for
    datasets.load_dataset. Raises UserError if it is not available."""
    load = load_dataset()  # its error comes before anything is read

    def texts():
        try:
            if 'data_files' not in options:
                check_hub(path)
            for row in load(path, split='train', streaming=True, **options):
                if isinstance(row['text'], str):
                    yield row['text']
        except Exception as error:  # noqa: BLE001  the hub's client raises errors of many libraries
            what = options.get('data_files', f'{path} {options} from the Hugging Face hub')
            reason = ' '.join(str(error).split())[:300]
            raise UserError(f"cannot stream the column 'text' of {what}: "
                            f'{type(error).__name__}: {reason}') from None
    return texts()


def _lines(path: Path) -> Iterator[str]:
    try:
        with open(path, encoding='utf-8-sig', newline='\n') as file:
            yield from (line.rstrip('\r\n') for line in file)
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f'{str(path)!r} cannot be read as UTF-8 text: {error}') from None


def _json_lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)['text']
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise UserError(f'{str(path)!r}, line {number}: allowed is a JSON object with a text, '
                            '{"text": "..."}')
        yield text


READERS = {'.jsonl': _json_lines, '.txt': _lines,
           '.parquet': lambda path: hub_documents('parquet', data_files=str(path))}
