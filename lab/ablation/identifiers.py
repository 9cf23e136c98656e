"""Loss on the identifiers of Python source by how many tokens back each was last used: a name that
the cache still holds is cheap to predict."""
import io
import keyword
import tokenize
from dataclasses import dataclass

import numpy as np

from common.errors import UserError
from data.bpe import END_OF_TEXT
from data.tokenizer import BPETokenizer

NEW = 'new'     # identifiers that the window has not had before
F_STRINGS = {getattr(tokenize, 'FSTRING_START', -1): 1, getattr(tokenize, 'FSTRING_END', -1): -1}


@dataclass
class Identifiers:
    """Identifiers in a sequence of tokens, in order; all arrays (n,) int64."""
    starts: np.ndarray  # position of the token with the first character
    ends: np.ndarray    # position after the token with the last character
    names: np.ndarray   # a number for each different name


def find_identifiers(ids: np.ndarray, tokenizer) -> Identifiers:
    """The identifiers of source files, each followed by '<|endoftext|>'. A file that Python's
    tokenize cannot read counts up to where it stops. ids: (n,) token ids. Raises UserError for
    tokens that are characters."""
    if not isinstance(tokenizer, BPETokenizer):
        raise UserError('identifiers=True: needs data in BPE tokens, with <|endoftext|>')
    end = tokenizer.encode(END_OF_TEXT)[0]
    numbers, found = {}, []
    stops = [*np.flatnonzero(ids == end).tolist(), len(ids)]
    for first, stop in zip([0, *(stop + 1 for stop in stops)], stops):
        pieces = [tokenizer.token_bytes(i) for i in ids[first:stop]]
        token_ends = np.cumsum([len(piece) for piece in pieces])  # in bytes
        spans = names_of(b''.join(pieces).decode(errors='replace'))
        if not spans:
            continue
        begin, finish = np.array([span for _, *span in spans]).T
        found += zip((first + np.searchsorted(token_ends, begin, side='right')).tolist(),
                     (first + np.searchsorted(token_ends, finish) + 1).tolist(),
                     (numbers.setdefault(name, len(numbers)) for name, *_ in spans))
    return Identifiers(*np.array(found, np.int64).reshape(-1, 3).T)


def names_of(source: str) -> list[tuple[str, int, int]]:
    """(name, first byte, byte after the last) of each identifier: NAME tokens but for keywords and
    what f-strings have in braces, which Python tells apart from 3.12 on only."""
    lines = io.StringIO(source, newline='').readlines()
    offsets = np.cumsum([0, *(len(line.encode()) for line in lines)]).tolist()
    found, depth = [], 0
    try:
        for token in tokenize.generate_tokens(iter(lines).__next__):
            depth += F_STRINGS.get(token.type, 0)
            if token.type == tokenize.NAME and not depth and not keyword.iskeyword(token.string):
                row, column = token.start
                start = offsets[row - 1] + len(lines[row - 1][:column].encode())
                found.append((token.string, start, start + len(token.string.encode())))
    except (tokenize.TokenError, SyntaxError):
        pass
    return found


def loss_by_distance(nats: np.ndarray, starts: np.ndarray, identifiers: Identifiers) -> dict:
    """Mean loss of identifiers, in nats of all of their tokens together, by the tokens since their
    name was last used in the window: {distance: {'count', 'nats'}}. Distances are powers of two and
    stand for those up to the next; NEW is for names that the window has not had.

    nats: (n, T), loss of the tokens after position starts[i] of window i. starts: (n,).
    """
    total, T = {}, nats.shape[1]
    for losses, start in zip(nats, starts.tolist()):
        first, stop = np.searchsorted(identifiers.starts, (start, start + T + 1))
        sums, last = np.concatenate([[0.0], np.cumsum(losses)]), {}
        for at, end, name in zip(*(each[first:stop].tolist() for each in (
                identifiers.starts, identifiers.ends, identifiers.names))):
            if start < at and end <= start + T + 1:
                key = 1 << max(at - last[name], 1).bit_length() - 1 if name in last else NEW
                count, loss = total.get(key, (0, 0.0))
                total[key] = count + 1, loss + sums[end - start - 1] - sums[at - start - 1]
            last[name] = at
    ordered = sorted(total, key=lambda key: (key == NEW, key if key != NEW else 0))
    return {key: {'count': total[key][0], 'nats': total[key][1] / total[key][0]} for key in ordered}
