"""Encode long texts in pieces: the same ids as for the entire text, in bounded memory."""

import re
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
    points = np.array([ord(c) for c in stoi])
    table = np.full(points.max() + 1, -1, dtype=np.int32)
    table[points] = list(stoi.values())

    def encode(text: str) -> np.ndarray:
        given = np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), dtype='<u4')
        ids = table[np.minimum(given, len(table) - 1)]
        unknown = (given >= len(table)) | (ids < 0)
        if unknown.any():
            raise UserError(f'character {chr(given[unknown][0])!r} is not in the alphabet '
                            f'of {len(stoi)} characters')
        return ids.astype(np.uint16)

    return encode


def bpe_arrays(encoding: Any, blocks: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield uint16 arrays that, joined, are encode_ordinary of the joined `blocks`.

    encoding: GPT-2's tiktoken.Encoding. Memory: two blocks.
    """
    rest = ''
    for block in blocks:
        rest += block
        found = UNTIL_LAST_BREAK.match(rest)
        if cut := found.end() if found else len(rest) * (len(rest) > LONGEST_PIECE):
            yield encode_text(encoding, rest[:cut])
            rest = rest[cut:]
    if rest:
        yield encode_text(encoding, rest)
