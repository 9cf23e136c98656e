"""Encode long texts in pieces: the same ids as for the entire text, in bounded memory."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from config.errors import UserError
from data.gpt2_bpe import encode_text

# text without blanks is cut after this many characters, which may change a token there
LONGEST_PIECE = 1 << 20

# GPT-2 splits text into words before it merges bytes, and a blank after a visible character always
# starts a new word: text cut just before such a blank gives the same ids as uncut.
UNTIL_LAST_BREAK = re.compile(r'.*(?<=\S)(?=[ \n])', re.DOTALL)


def alphabet_meta(characters: Iterable[str]) -> dict:
    """Return nanoGPT's meta.pkl for sorted characters. UserError if there are over 65,536."""
    chars = sorted(set(characters))
    if not 0 < len(chars) <= 65536:
        raise UserError(f'the text has {len(chars):,} different characters; '
                        'allowed are 1 to 65,536 (or --tokenizer=gpt2)')
    itos = dict(enumerate(chars))
    return {'vocab_size': len(chars), 'itos': itos, 'stoi': {c: i for i, c in itos.items()}}


def char_encoder(stoi: dict[str, int]) -> Callable[[str], np.ndarray]:
    """Return a function: text -> ids (len(text),) uint16; UserError for unknown characters."""
    table = np.full(sys.maxunicode + 1, -1, dtype=np.int32)
    table[[ord(c) for c in stoi]] = list(stoi.values())

    def encode(text: str) -> np.ndarray:
        ids = table[np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), dtype='<u4')]
        if ids.min(initial=0) < 0:
            raise UserError(f'character {text[ids.argmin()]!r} is not in the alphabet '
                            f'of {len(stoi)} characters')
        return ids.astype(np.uint16)

    return encode


def bpe_arrays(encoding: Any, blocks: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield uint16 arrays that, joined, are encode_ordinary of the joined `blocks`, for a
    tiktoken.Encoding with GPT-2's pattern. Memory: two blocks."""
    rest = ''
    for block in blocks:
        rest += block
        found = UNTIL_LAST_BREAK.match(rest)
        if cut := found.end() if found else len(rest) * (len(rest) > LONGEST_PIECE):
            yield encode_text(encoding, rest[:cut])
            rest = rest[cut:]
    if rest:
        yield encode_text(encoding, rest)
