"""Stop texts: whatever the pieces, the output is the text up to the first stop text, and comes as
early as possible."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from engine.requests.stopping import SampleText, StopFilter, parse_stops

SHORT = st.text('ab', max_size=12)
STOPS = st.lists(st.text('abc', min_size=1, max_size=5), max_size=4)


def cut(text, stops):
    """The definition, letter by letter: `text` up to where a stop text is first complete, without
    the longest stop text that ends there."""
    for n in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:n].endswith(stop)]
        if complete:
            return text[:n - max(map(len, complete))]
    return text


@given(pieces=st.lists(SHORT, max_size=8), stops=STOPS)
def test_the_text_ends_at_the_first_stop_text_and_is_out_as_soon_as_it_is_certain(pieces, stops):
    """Exactly the longest suffix that is the beginning of a stop text is held back."""
    filter, text, out = StopFilter(stops), '', ''
    for piece in pieces:
        text, out = text + piece, out + filter(piece)
        if filter.found is None:
            ends = [text[i:] for i in range(len(text) + 1)]
            assert out + next(end for end in ends if end == ''
                              or any(stop.startswith(end) for stop in stops)) == text
    assert out + filter.end() == cut(text, stops)
    assert (filter.found is not None) == any(stop in text for stop in stops)


# -- the text of a sample --------------------------------------------------------------------------

class Halves:
    """A decoder whose ids are halves of characters, like bytes of UTF-8: a character is complete
    with its second half."""

    def __init__(self):
        self.half = False

    def __call__(self, token):
        self.half = not self.half
        return '' if self.half else chr(token)

    def end(self):
        return '?' if self.half else ''


def test_the_end_brings_pending_text_and_the_incomplete_character():
    text = SampleText(Halves(), ['ab'])
    assert [text.add(ord(c)) for c in 'xxaab'] == ['', 'x', '', '', '']
    assert (text.end(), text.text, text.stopped, text.n_tokens) == ('a?', 'xa?', False, 5)
    text = SampleText(Halves(), ['a?'])
    for c in 'xxaab':
        text.add(ord(c))
    assert (text.end(), text.text, text.stopped) == ('', 'x', True)


# -- the key `stop` --------------------------------------------------------------------------------

@pytest.mark.parametrize('value, expected', [
    ('', ()), ('\n\n', ('\n\n',)), ('\\n', ('\\n',)), ("'a'", ("'a'",)), ('[]', ()),
    ("['\\n\\n', 'THE END']", ('\n\n', 'THE END')), (' [ "a" ] ', ('a',)), ("['[1]']", ('[1]',)),
    ('[', ('[',)), ('[END]', ('[END]',)), (' [', (' [',)), ("('a', 'b')", ("('a', 'b')",)),
    ('[' * 9999, ('[' * 9999,))])
def test_the_key_is_a_text_or_a_list_of_texts(value, expected):
    assert parse_stops(value) == expected


@pytest.mark.parametrize('value', ["['a',", ' [ "a', "['a', b]", "['']", "['a', 5]", '[1]',
                                   "[['a']]"])
def test_another_list_is_refused(value):
    with pytest.raises(UserError) as caught:
        parse_stops(value)
    assert repr(value) in str(caught.value) and "['one', 'two']" in str(caught.value)
