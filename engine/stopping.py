"""Where the text of a sample ends: stop texts, found while it is being decoded. No torch here.

    stop texts 'the end', '\\n\\n'  pieces in  'It is th' | 'en. Wa'   | 'it for the e' | 'nd of it'
                                  pieces out 'It is '   | 'then. Wa' | 'it for '      | '', stopped
"""
import ast
from collections.abc import Iterable

from config.errors import UserError


class StopFilter:
    """Text goes in piece by piece; out comes at once what is certainly no part of a stop text.

    Text stops as soon as one of the stop texts is complete; of several that end with the same
    character the longest is taken. So the result does not depend on how text is cut into tokens,
    and contains no stop text. (Engines that look once per token, such as vLLM, take the first in
    the list that a token completed: the same but for rare overlaps.)

    Raises:
        UserError: a stop text is empty.
    """

    def __init__(self, stops: Iterable[str] = ()):
        self.stops = tuple(stops)
        if '' in self.stops:
            raise UserError(f'stop={list(self.stops)!r}: '
                            'a stop text must have at least one character')
        # the longest end of the text so far that may be the beginning of a stop text
        self.held = ''
        self.found = None    # the stop text at which it stopped

    def __call__(self, piece: str) -> str:
        """What `piece` makes certain; '' for all that comes after a stop text."""
        if self.found is not None:
            return ''
        text = self.held + piece
        matches = [(start + len(stop), start, stop) for stop in self.stops
                   if (start := text.find(stop)) >= 0]
        if matches:
            _, start, self.found = min(matches)
            self.held = ''
            return text[:start]
        kept = self._possible_beginning(text)
        self.held = text[len(text) - kept:]
        return text[:len(text) - kept]

    def end(self) -> str:
        """What was held back, when no more text comes."""
        held, self.held = self.held, ''
        return held

    def _possible_beginning(self, text: str) -> int:
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        return next((n for n in range(min(longest, len(text)), 0, -1)
                     if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)


class SampleText:
    """The text of one sample, from its tokens: what `decode` makes of them, cut at the first stop
    text.

    Args:
        decode: a `TextStream` of the tokenizer (one id in, the text that it completes out).
        stops: stop texts; they are looked for in what is generated, not in the prompt.
    """

    def __init__(self, decode, stops: Iterable[str] = ()):
        self.decode, self.filter = decode, StopFilter(stops)
        # the token that completes a stop text counts, later ones do not
        self.pieces, self.n_tokens = [], 0

    @property
    def text(self) -> str:
        """All that has come out so far."""
        return ''.join(self.pieces)

    @property
    def stopped(self) -> bool:
        return self.filter.found is not None

    def add(self, token: int) -> str:
        """The further text that is now certain; '' once the sample has stopped."""
        if self.stopped:
            return ''
        self.n_tokens += 1
        return self._take(self.filter(self.decode(token)))

    def end(self) -> str:
        """The rest, when no more tokens come: text held back, an incomplete character."""
        if self.stopped:
            return ''
        return self._take(self.filter(self.decode.end()) + self.filter.end())

    def _take(self, piece: str) -> str:
        self.pieces.append(piece)
        return piece


def parse_stops(value: str) -> tuple[str, ...]:
    r"""The stop texts that the key `stop` means.

        ''                       none
        'THE END'                that text, to the letter (in a shell --stop=$'\n\n' or
                                 --stop="'\n\n'" is two newlines)
        "['\n\n', 'THE END']"    each of a Python list

    What begins with a bracket and a quote, or reads as a list, is a list; a text like that goes
    into one: "['[1]']".

    Raises:
        UserError: a broken list, something else than text in it, an empty text.
    """
    if value == '':
        return ()
    try:
        stops = ast.literal_eval(value.strip()) if value.lstrip().startswith('[') else value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        if value.lstrip()[1:].lstrip()[:1] in ('"', "'"):
            raise UserError(f'stop={value!r} begins like a list of texts, but is none: write '
                            "\"['one', 'two']\", or to stop at just this text, a list with it "
                            'inside') from None
        stops = value  # such as '[END]'
    if not isinstance(stops, list):
        return (value,)
    for stop in stops:
        if not isinstance(stop, str) or stop == '':
            raise UserError(f'stop={value!r}: {stop!r} is not a text of at least one character: '
                            "write \"['one', 'two']\", or to stop at just this text, a list with "
                            'it inside')
    return tuple(stops)
