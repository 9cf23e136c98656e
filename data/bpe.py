"""Byte pair encodings: GPT-2's, and those learned from a data set's own text.

GPT-2's is tiktoken's download, from one host. If that host is unreachable, pip fetches the
openai-whisper source distribution, which has the same 50,256 ranks, and runs its build code after
checking the hash. The ranks are cached in ~/.cache/nanokv (or $XDG_CACHE_HOME/nanokv, or
$NANOKV_CACHE), and verified on every load.

A learned one is kept in meta.pkl, which has nanoGPT's keys. The bytes of a token are the Latin-1
characters of its key in `stoi`, so that tokens of ASCII text are that text, and nanoGPT's own
sample.py can read them. The first 256 ids are the bytes, followed by the merges in order (Sennrich
et al. 2016; on bytes, GPT-2's), and by '<|endoftext|>'. Text is split into words by GPT-2's pattern
first.
"""
import base64
import contextlib
import io
import os
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator, Set
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError, shown
from common.files import replacing, user_cache
from data.download import fetch_sdist, read_checked

REQUIREMENT = 'openai-whisper==20250625'
SDIST_SHA256 = '37a91a3921809d9f44748ffc73c0a55c9f366c85a3ef5c2ae0cc09540432eb96'
MEMBER = 'whisper/assets/gpt2.tiktoken'
RANKS_SHA256 = '306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930'
END_OF_TEXT = '<|endoftext|>'
# how GPT-2 splits text into words
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BLANK_RUN = 100_000
WAIT = 20.0  # seconds allowed for tiktoken's download, which has no time limit itself
FEWEST, MOST = 257, 65536  # bytes and '<|endoftext|>'; uint16 ids
# longer words are cut to learn tokens, which takes time that grows with the square of their length
LONGEST_WORD = 1000
LONG_WORD = re.compile(r'(?:[^\W\d_]{%d}|[\d_]{%d}|[^\w\s]{%d}|\s{%d})' % ((LONGEST_WORD,) * 4))


# -- GPT-2's ---------------------------------------------------------------------------------------

def gpt2_encoding() -> Any:
    """Load the tiktoken.Encoding 'gpt2': 50,257 ids, of which 50256 is '<|endoftext|>'. Raises
    UserError if neither nanoKV's cache, nor tiktoken (its cache, its download), nor pip has it."""
    import tiktoken

    try:
        ranks = read_checked(cache_folder() / 'gpt2.tiktoken', RANKS_SHA256, 'ranks')
    except UserError:  # missing or damaged
        try:
            with ThreadPool(1) as pool:  # of a daemon, which does not keep the program alive
                return pool.apply_async(tiktoken.get_encoding, ['gpt2']).get(WAIT)
        except Exception as error:  # noqa: BLE001  they have no common base
            why = type(error).__name__
        print(f"tiktoken cannot get GPT-2's vocabulary ({why}); trying pip", file=sys.stderr)
        ranks = _fetch(why)
    return encoding_of(ranks)


def encoding_of(ranks: bytes) -> Any:
    """Make a tiktoken.Encoding from a .tiktoken file: lines of a base64 token and its rank."""
    import tiktoken

    pairs = (line.split() for line in ranks.splitlines() if line)
    table = {base64.b64decode(token): int(rank) for token, rank in pairs}
    return tiktoken.Encoding('gpt2', pat_str=PATTERN, mergeable_ranks=table,
                             special_tokens={END_OF_TEXT: len(table)})


def encode_text(encoding: Any, text: str, special: Set[str] = frozenset()) -> np.ndarray:
    """The ids of `valid_text(text)`, (n,) uint16. '<|endoftext|>' is text unless in `special`.

    tiktoken's regex engine panics on a run of about a million blanks, so runs longer than
    BLANK_RUN are encoded in pieces, which decode to the same text.
    """
    text = valid_text(text)
    cuts = [match.end() for match in re.finditer(r'\s{%d}' % BLANK_RUN, text)]
    # encode_to_numpy makes no Python list, so threads encode in parallel
    return np.concatenate([
        encoding.encode_to_numpy(text[a:b], allowed_special=special,
                                 disallowed_special=()).astype(np.uint16)
        for a, b in zip([0, *cuts], [*cuts, len(text)])])


def valid_text(text: str) -> str:
    """Return `text` as text that UTF-8 can store. JSON may escape half of a surrogate pair, which
    becomes '\ufffd'; the two halves of a pair become their character."""
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


def cache_folder() -> Path:
    """Return the cache folder: $NANOKV_CACHE, $XDG_CACHE_HOME/nanokv or ~/.cache/nanokv."""
    return Path(os.environ.get('NANOKV_CACHE') or user_cache())


def _fetch(why: str) -> bytes:
    hint = (f"GPT-2's vocabulary is downloaded on first use, and tiktoken failed too ({why}): "
            'connect once, or set TIKTOKEN_CACHE_DIR to a folder that has it')
    sdist = io.BytesIO(fetch_sdist(REQUIREMENT, SDIST_SHA256, hint))
    with tarfile.open(fileobj=sdist, mode='r:gz') as tar:
        # the hash of the source distribution has been checked
        member = next(member for member in tar if member.name.partition('/')[2] == MEMBER)
        ranks = tar.extractfile(member).read()
    with contextlib.suppress(OSError):  # without a cache, it is fetched again next time
        cache_folder().mkdir(parents=True, exist_ok=True)
        with replacing(cache_folder() / 'gpt2.tiktoken') as part:
            part.write_bytes(ranks)
    return ranks


# -- learned from text -----------------------------------------------------------------------------

def learn_bpe(texts: Iterable[str], vocab_size: int) -> dict:
    """Learn at most `vocab_size` tokens, 257 to 65,536 (else UserError), and return the contents of
    meta.pkl. Words end with their text, and with a note after LONGEST_WORD characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if not FEWEST <= vocab_size <= MOST:
        raise UserError(f'tokenizer=bpe:{vocab_size}: allowed are {FEWEST} to {MOST:,} tokens')
    letters = byte_letters()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(_cut_long_words(map(valid_text, texts)), trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=list(letters.values()), show_progress=False))
    byte_of = {letter: byte for byte, letter in letters.items()}
    ids = tokenizer.get_vocab()
    tokens = [bytes(map(byte_of.get, text)).decode('latin-1') for text in sorted(ids, key=ids.get)]
    tokens = [*map(chr, range(256)), *(token for token in tokens if len(token) > 1), END_OF_TEXT]
    stoi = {token: i for i, token in enumerate(tokens)}
    return {'vocab_size': len(tokens), 'stoi': stoi, 'itos': dict(enumerate(tokens)),
            'tokenizer': 'bpe'}


def _cut_long_words(texts: Iterable[str]) -> Iterator[str]:
    n_cuts = 0
    for text in texts:
        start = 0
        for match in LONG_WORD.finditer(text):
            yield text[start:match.end()]
            start = match.end()
            n_cuts += 1
        yield text[start:]
    if n_cuts:
        print(f'Note: words of more than {LONGEST_WORD:,} characters were cut to learn tokens, in '
              f'{n_cuts:,} places', file=sys.stderr)


def learned_encoding(stoi: dict[str, int]) -> Any:
    """Return the tiktoken.Encoding of a vocabulary that `learn_bpe` made, of a meta.pkl without
    `meta_problem` (tiktoken would panic). Raises UserError if it lacks a byte, or '<|endoftext|>',
    or has characters beyond Latin-1."""
    import tiktoken

    try:
        ranks = {token.encode('latin-1'): i for token, i in stoi.items() if token != END_OF_TEXT}
        special = {END_OF_TEXT: stoi[END_OF_TEXT]}
        lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    except (UnicodeEncodeError, KeyError) as error:
        raise UserError(f'the tokens are no byte pair encoding: '
                        f'{type(error).__name__} for {shown(error.args[0])}') from None
    if lacking:
        raise UserError(f'the byte pair encoding lacks {len(lacking)} bytes, e.g. {lacking[0]}')
    return tiktoken.Encoding('learned', pat_str=PATTERN, mergeable_ranks=ranks,
                             special_tokens=special)


def encode_documents(encoding: Any, texts: Iterable[str]) -> np.ndarray:
    """Return the ids of the texts, with '<|endoftext|>' after each: (n,) uint16."""
    end, parts = np.array([encoding.eot_token], np.uint16), [np.zeros(0, np.uint16)]
    for text in texts:
        parts += [encode_text(encoding, text), end]
    return np.concatenate(parts)


def byte_letters() -> dict[int, str]:
    """Return the printable character that stands for each byte in GPT-2's vocab.json and in
    Hugging Face's files: itself if visible, otherwise the next one from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {
        byte: chr(256 + i) for i, byte in enumerate(others)}
