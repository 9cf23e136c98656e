"""GPT-2's byte pair encoding: tiktoken's download, or the same ranks from PyPI.

tiktoken fetches the vocabulary from one host. If that host is unreachable, pip fetches the
openai-whisper source distribution, which has the same 50,256 ranks, and runs its build code after
checking the hash. The ranks are cached in ~/.cache/nanokv (or $XDG_CACHE_HOME/nanokv, or
$NANOKV_CACHE), and verified on every load.
"""

import base64
import io
import os
import re
import sys
import tarfile
from collections.abc import Set
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np

from config.errors import UserError
from config.files import make_folders, replacing, user_cache
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
        print(f"tiktoken cannot get GPT-2's vocabulary ({why}); trying another source",
              file=sys.stderr)
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
    """Return the ids of `valid_text(text)` as (n,) uint16. '<|endoftext|>' in it is plain text
    unless in `special`.

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
    try:
        make_folders(cache_folder(), 0o755)
        with replacing(cache_folder() / 'gpt2.tiktoken') as part:
            part.write_bytes(ranks)
    except OSError as error:
        print(f'cannot keep it in {str(cache_folder())!r} ({error.strerror}); '
              'set NANOKV_CACHE to a folder of yours', file=sys.stderr)
    return ranks
