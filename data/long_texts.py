"""Turn long texts into token ids piece by piece, with bounded memory and the same ids as in one go."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from config.errors import UserError
from data.gpt2_bpe import encode_text

LONGEST_PIECE = 1 << 24  # a text without any blank is cut after so many characters, which may change a token there

# GPT-2 splits text into words before it merges bytes, and a blank that follows something visible always starts a new
# word: text cut just before such a blank gives the same ids as the whole.
WORD_BREAK = re.compile(r'(?<=\S)(?=[ \n])')


def alphabet_meta(characters: Iterable[str]) -> dict:
    """nanoGPT's meta.pkl for the characters of a text: ids by sorted order. UserError for more than 65,536 of them."""
    chars = sorted(set(characters))
    if not 0 < len(chars) <= 65536:
        raise UserError(f'the text has {len(chars):,} different characters; allowed are 1 to 65,536 (or --tokenizer=gpt2)')
    return {'vocab_size': len(chars), 'itos': dict(enumerate(chars)), 'stoi': {c: i for i, c in enumerate(chars)}}


def char_encoder(stoi: dict[str, int]) -> Callable[[str], np.ndarray]:
    """A function from a text to its ids, (len(text),) uint16. It raises UserError for a character that `stoi` lacks."""
    points = np.array([ord(c) for c in stoi])
    table = np.full(points.max() + 1, -1, dtype=np.int32)
    table[points] = list(stoi.values())

    def encode(text: str) -> np.ndarray:
        given = np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), dtype='<u4')
        ids = table[np.minimum(given, len(table) - 1)]
        unknown = (given >= len(table)) | (ids < 0)
        if unknown.any():
            raise UserError(f'character {chr(given[unknown][0])!r} is not in the alphabet of {len(stoi)} characters')
        return ids.astype(np.uint16)

    return encode


def bpe_arrays(encoding: Any, blocks: Iterable[str]) -> Iterator[np.ndarray]:
    """The ids of the text whose pieces are `blocks`, as uint16 arrays; joined they are encode_ordinary of the whole.

    encoding: a tiktoken.Encoding of GPT-2. Memory: two pieces, unless the text has no blanks (see LONGEST_PIECE).
    """
    rest = ''
    for block in blocks:
        rest += block
        cut = _last_break(rest)
        if cut or len(rest) > LONGEST_PIECE:
            cut = cut or len(rest)
            yield encode_text(encoding, rest[:cut])
            rest = rest[cut:]
    if rest:
        yield encode_text(encoding, rest)


def _last_break(text: str) -> int:
    """The last position where `text` may be cut, 0 if there is none; looks near the end first."""
    for start in (max(len(text) - 1000, 0), 0):
        cuts = [match.start() for match in WORD_BREAK.finditer(text, start)]
        if cuts:
            return cuts[-1]
    return 0
