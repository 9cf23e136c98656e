"""Text of models and files on its way to a terminal."""
import re
import sys

# C0 except tab and newline, DEL and C1; marks that change the direction of text; surrogates
CONTROLS = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069'
                      '\ud800-\udfff]')


def visible(text: str, stream=None) -> str:
    r"""Return `text` as it should be written to `stream` (default: stdout). If that is a terminal,
    control characters are escaped, as \x1b: they could otherwise move the cursor, change the title
    or the clipboard, or hide text. Files and pipes get the text unchanged."""
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        return text
    return CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)
