"""Detects stop texts while a sample is being decoded. No torch here.

    stop texts 'the end', '\\n\\n'  pieces in  'It is th' | 'en. Wa'   | 'it for the e' | 'nd of it'
                                  pieces out 'It is '   | 'then. Wa' | 'it for '      | '', stopped
"""
import ast
from collections.abc import Iterable

from common.errors import UserError


class StopFilter:
    """Passes on text piece by piece, except what is or may become part of a stop text.

    Text ends before the first stop text to be completed; if several are completed by the same
    character, the longest counts. So the result does not depend on how text is split into tokens.
    """

    def __init__(self, stops: Iterable[str] = ()):
        self.stops = tuple(stops)
        self.pending = ''  # the longest suffix of the text that may begin a stop text
        self.found = None  # the stop text at which it ended

    def __call__(self, piece: str) -> str:
        """Return the text that is final after `piece`; '' once a stop text was found."""
        if self.found is not None:
            return ''
        text = self.pending + piece
        matches = [(start + len(stop), start, stop) for stop in self.stops
                   if (start := text.find(stop)) >= 0]
        if matches:
            _, start, self.found = min(matches)
            self.pending = ''
            return text[:start]
        starts = (i for i in range(len(text))
                  if any(stop.startswith(text[i:]) for stop in self.stops))
        start = next(starts, len(text))
        self.pending = text[start:]
        return text[:start]

    def end(self) -> str:
        """Return the pending text, at the end of the input."""
        pending, self.pending = self.pending, ''
        return pending


class SampleText:
    """The decoded text of one sample, without the prompt, cut at the first stop text.
    decode: the tokenizer's `TextStream`, which returns the text completed by each id."""

    def __init__(self, decode, stops: Iterable[str] = ()):
        self.decode, self.filter = decode, StopFilter(stops)
        self.text, self.n_tokens = '', 0  # up to the token that completes a stop text

    @property
    def stopped(self) -> bool:
        return self.filter.found is not None

    def add(self, token: int) -> str:
        """Return the additional text that is now final; '' once the sample has stopped."""
        if self.stopped:
            return ''
        self.n_tokens += 1
        piece = self.filter(self.decode(token))
        self.text += piece
        return piece

    def end(self) -> str:
        """Return the rest after the last token: pending text, an incomplete character."""
        piece = self.filter(self.decode.end()) + self.filter.end()
        self.text += piece
        return piece


def parse_stops(value: str) -> tuple[str, ...]:
    r"""Parse the value of the key `stop`.

        ''                       none
        'THE END'                that text, literally (in a shell --stop=$'\n\n' or
                                 --stop="['\n\n']" is two newlines)
        "['\n\n', 'THE END']"    each of a Python list

    A value that begins with a bracket and a quote, or reads as a list, is a list; a text that looks
    like one goes into a list: "['[1]']".
    Raises UserError for an invalid list, or one with an empty text or an item that is not a text.
    """
    text = value.strip()
    if not text.startswith('['):
        return (value,) if value else ()
    try:
        stops = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        stops = None if text[1:].lstrip()[:1] in ('"', "'") else value
    if isinstance(stops, (str, tuple)):  # such as '[END]' and '[1], [2]'
        return (value,)
    if stops is None or not all(isinstance(stop, str) and stop for stop in stops):
        raise UserError(f'stop={value!r} is not a list of texts of at least one character: write '
                        "\"['one', 'two']\", or to stop at just this text, a list with it inside")
    return tuple(stops)
