"""Datasets too big for memory: documents streamed from the Hugging Face hub, or from files of yours, into token shards.

    documents -> batches of texts -> GPT-2 BPE in several processes, in order -> train_00000.bin, ..., val.bin

Each document is followed by <|endoftext|> (50256). A document is for validation if a hash of its text says so: that is the
same at every run, without knowing how many there are, and duplicates of a document stay on one side.
"""

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config.errors import UserError
from data.gpt2_bpe import encode_text, gpt2_encoding
from data.making.resume import ResumableWriter
from data.making.script import Arguments, fraction, whole

BATCH = 1 << 20  # characters that a process encodes at a time
KINDS = ('.jsonl', '.txt', '.parquet')
CHECKPOINT = 20_000_000  # tokens after which progress is made safe against an interruption


class Tokens(NamedTuple):
    """What became of one batch: ids of its train and its val documents, and how many documents and UTF-8 bytes they were."""
    train: np.ndarray
    val: np.ndarray
    documents: int
    nbytes: int


def arguments(doc: str, script: str) -> Arguments:
    """The command line that all streamed datasets share; `doc` and `script` are the prepare.py's docstring and file."""
    parser = Arguments(doc)
    parser.add_argument('--from', dest='files', type=Path, nargs='+', metavar='FILE', help='documents from files instead: '
                        '.jsonl (a "text" per line), .txt (a document per line), .parquet (a column "text")')
    parser.add_argument('--max_tokens', type=whole, metavar='N', help='stop after so many train tokens (default: all)')
    parser.add_argument('--val', type=fraction, default=0.0005, metavar='SHARE',
                        help='share of the documents held out (default: 0.0005)')
    parser.add_argument('--shard_tokens', type=whole, default=100_000_000, metavar='N',
                        help='tokens of a train file (default: 100,000,000, which are 200 MB)')
    parser.add_argument('--workers', type=whole, default=max(1, (os.cpu_count() or 2) - 1), metavar='N',
                        help='processes that encode (default: one per core but one)')
    parser.add_argument('--restart', action='store_true', help='discard the progress of an interrupted preparation')
    parser.out(script)
    return parser


def prepare(args: Any, path: str, config: str | None = None) -> None:
    """Make the dataset that the command line `args` (see arguments()) asks for, of `config` of the hub's dataset `path`.

    Ctrl-C keeps what was done, and the same command goes on from there; so does one with another --max_tokens, if that is
    not reached yet. UserError if the documents cannot be had, or other settings have progress in args.out (but for
    args.restart).
    """
    source, name = _source(args.files, path, config)
    key = {'source': name, 'val': args.val, 'shard_tokens': args.shard_tokens, 'max_tokens': args.max_tokens}
    encoding = gpt2_encoding()
    if args.restart:
        next(iter(source(0)), None)  # what cannot be had shall discard nothing
    with ResumableWriter(args.out, args.shard_tokens, key, args.restart) as out:
        if out.finished:
            print('all had been encoded: finished what was interrupted', file=sys.stderr)
        else:
            _write(out, source, encoding, args)
    for split in ('train', 'val'):
        print(f'{split} has {out.tokens[split]:,} tokens')


def _source(files: list[Path] | None, path: str, config: str | None) -> tuple[Callable[[int], Iterable[str]], list]:
    """(a function from the number to skip to the documents, what identifies them). UserError if they cannot be had."""
    if not files:
        load_dataset()
        return lambda skip: hub_documents(path, config, skip), [path, config]
    check_files(files)
    # a file that grew or was cut is another one; its time is left out, so that a copy of it will do
    return lambda skip: file_documents(files, skip), [[str(file.resolve()), file.stat().st_size] for file in files]


def _write(out: ResumableWriter, source: Callable[[int], Iterable[str]], encoding: Any, args: Any) -> None:
    """write(), saying on stderr where it starts, and on an exception what it keeps."""
    if out.documents:
        print(f'going on after {out.documents:,} documents, {sum(out.tokens.values()):,} tokens', file=sys.stderr)
    try:
        write(out, source, encoding, args)
    except BaseException:
        if out.saved:
            print(f'kept {out.documents:,} documents in {str(args.out)!r}: the same command goes on from there',
                  file=sys.stderr)
        raise


def write(out: ResumableWriter, source: Callable[[int], Iterable[str]], encoding: Any, args: Any) -> None:
    """Encode the documents that `source(number to skip)` gives and add them to `out`, until the end or max_tokens."""
    documents, report = out.documents, Report(out)
    left = args.max_tokens - out.tokens.get('train', 0) if args.max_tokens else None
    next_checkpoint = sum(out.tokens.values()) + CHECKPOINT
    with contextlib.closing(encoded(batches(source(documents)), encoding, args.val, args.workers)) as results:
        for tokens in results:
            train = tokens.train[:left]
            out.add('train', train)
            out.add('val', tokens.val)
            documents += tokens.documents
            report(tokens)
            if left is not None:
                left -= len(train)
                if left == 0:
                    break
            if sum(out.tokens.values()) >= next_checkpoint:
                out.checkpoint(documents)
                next_checkpoint = sum(out.tokens.values()) + CHECKPOINT
    report.end()
    for name in ('train', 'val'):
        if not out.tokens.get(name):
            out.forget()  # going on would not help
            raise UserError(f'none of {documents:,} documents is for {name} with --val={args.val}; allowed are more '
                            'documents or another share')


def batches(documents: Iterable[str], characters: int = BATCH) -> Iterator[list[str]]:
    """Documents in lists of at least so many characters (but the last one), the empty ones too: skipping counts them."""
    batch, size = [], 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= characters or len(batch) >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_batch(texts: list[str], encoding: Any, share: float) -> Tokens:
    """The ids of some documents, each followed by <|endoftext|>; empty ones count, but give no ids."""
    parts: dict[str, list[np.ndarray]] = {'train': [np.zeros(0, np.uint16)], 'val': [np.zeros(0, np.uint16)]}
    eot, nbytes = np.array([encoding.eot_token], dtype=np.uint16), 0
    for text in texts:
        data = text.encode('utf-8', 'surrogatepass')
        nbytes += len(data)
        if data:
            parts['val' if held_out(data, share) else 'train'] += [encode_text(encoding, text), eot]
    return Tokens(np.concatenate(parts['train']), np.concatenate(parts['val']), len(texts), nbytes)


def held_out(data: bytes, share: float) -> bool:
    """Whether the document with these UTF-8 bytes is for validation, which it is with probability `share`."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), 'big') < share * 2**64


def encoded(texts: Iterable[list[str]], encoding: Any, share: float, workers: int) -> Iterator[Tokens]:
    """encode_batch of each batch, in order, by so many processes; at most 2 batches a process are on their way."""
    if workers == 1:
        for batch in texts:
            yield encode_batch(batch, encoding, share)
        return
    context = multiprocessing.get_context('spawn')  # the hub's library has threads, which a fork would break
    pool = ProcessPoolExecutor(workers, context, _start_worker, (encoding, share))
    pending: deque = deque()
    try:
        for batch in texts:
            with _without_ctrl_c():
                pending.append(pool.submit(_work, batch))  # which may start a process
            if len(pending) >= 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError(f'one of {workers} encoding processes died, perhaps for lack of memory; '
                        'run it again with fewer --workers') from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def check_files(files: list[Path]) -> None:
    """UserError for a file of another kind than KINDS, and for one that is missing or cannot be read."""
    for path in files:
        if path.suffix not in KINDS:
            raise UserError(f'{str(path)!r}: allowed are {", ".join(KINDS[:-1])} and {KINDS[-1]} files')
        if not os.path.isfile(path):
            raise UserError(f'no file {str(path)!r}')
        if not os.access(path, os.R_OK):
            raise UserError(f'cannot read {str(path)!r}: no permission')
    if any(path.suffix == '.parquet' for path in files):
        load_dataset()


def file_documents(files: list[Path], skip: int = 0) -> Iterator[str]:
    """The documents of .jsonl, .txt and .parquet files in turn, without the first `skip`.

    UserError for another kind of file, and for one that is missing or not what its name says.
    """
    check_files(files)
    readers = dict(zip(KINDS, (_json_lines, _lines, _parquet)))
    return itertools.islice(itertools.chain.from_iterable(readers[path.suffix](path) for path in files), skip, None)


def load_dataset() -> Callable:
    """datasets.load_dataset. UserError unless the package is there in version 4 or newer: older ones run programs that lie
    in the hub's repositories, or ask whether they may."""
    try:
        import datasets
    except ImportError:
        raise UserError("this needs the package datasets: `pip install 'datasets>=4'` (or --from=FILE.jsonl)") from None
    major = datasets.__version__.partition('.')[0]
    if not major.isdigit() or int(major) < 4:
        raise UserError(f'this needs the package datasets in version 4 or newer, and {datasets.__version__} is installed: '
                        "`pip install -U 'datasets>=4'` (or --from=FILE.jsonl)")
    return datasets.load_dataset


def hub_documents(path: str, config: str | None = None, skip: int = 0, **options: Any) -> Iterator[str]:
    """The column 'text' of a hub dataset's split 'train', without the first `skip` rows. UserError if it cannot be had.

    options: more arguments of datasets.load_dataset, e.g. data_files for path='json' or 'parquet'.
    """
    load = load_dataset()
    try:
        try:
            rows = load(path, config, split='train', streaming=True, **options)
        except RuntimeError as error:  # the repository has a program instead of files: the hub's own conversion will do
            if 'scripts' not in str(error):
                raise
            rows = load(path, config, split='train', streaming=True, revision='refs/convert/parquet')
        for row in rows.skip(skip) if skip else rows:
            text = row['text']
            yield text if isinstance(text, str) else ''  # counted, so that skipping stays right
    except KeyError as error:
        raise UserError(f"{options.get('data_files', path)!r} has no column {error}; allowed is a column 'text'") from None
    except Exception as error:  # noqa: BLE001  the hub's client raises errors of many libraries
        reason = (' '.join(str(error).split()) or 'no reason given')[:300]
        what = options.get('data_files') or f'{path}{f" ({config})" if config else ""} from the Hugging Face hub'
        raise UserError(f'cannot stream {what}: {type(error).__name__}: {reason}') from None


class Report:
    """Progress on stderr: a line that is kept up to date on a terminal, else one line a minute."""

    def __init__(self, out: ResumableWriter):
        self.out, self.start, self.nbytes, self.tokens, self.shown = out, time.monotonic(), 0, 0, time.monotonic()
        self.terminal = sys.stderr.isatty()
        self.clear = '\x1b[K' if self.terminal else ''  # of a longer line before

    def __call__(self, tokens: Tokens) -> None:
        """Count a batch, and show how far we are if it is time to."""
        self.nbytes += tokens.nbytes
        self.tokens += len(tokens.train) + len(tokens.val)
        now = time.monotonic()
        if now - self.shown >= (0.5 if self.terminal else 60):
            self.shown = now
            print(self.line(now), end='\r' if self.terminal else '\n', file=sys.stderr, flush=True)

    def line(self, now: float) -> str:
        """Tokens in all, and this run's text and speed."""
        total = sum(self.out.tokens.values())
        speed = self.tokens / (now - self.start + 1e-9)
        return f'{total:,} tokens ({self.nbytes / 1e6:,.1f} MB of text, {speed:,.0f} tokens/s)' + self.clear

    def end(self) -> None:
        """The last line."""
        print(self.line(time.monotonic()), file=sys.stderr)


def _json_lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)['text']
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise UserError(f'{str(path)!r}, line {number}: allowed is a JSON object with a text, {{"text": "..."}}')
        yield text


def _lines(path: Path) -> Iterator[str]:
    try:
        with open(path, encoding='utf-8-sig', newline='\n') as file:
            for line in file:
                yield line.rstrip('\r\n')
    except UnicodeDecodeError as error:
        raise UserError(f'{str(path)!r} is not UTF-8 text ({error.reason})') from None
    except OSError as error:
        raise UserError(f'cannot read {str(path)!r}: {error.strerror}') from None


def _parquet(path: Path) -> Iterator[str]:
    return hub_documents('parquet', data_files=str(path))


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Hold Ctrl-C back. Processes inherit that: it cannot break one in the midst of its start, before _start_worker."""
    if not hasattr(signal, 'pthread_sigmask'):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker: tuple = ()  # in a worker process: the encoding, the share held out


def _start_worker(encoding: Any, share: float) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent ends the pool in order
    _worker = encoding, share
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would otherwise wait for work for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(texts: list[str]) -> Tokens:
    return encode_batch(texts, *_worker)
