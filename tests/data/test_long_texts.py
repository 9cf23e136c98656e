"""Texts encoded in pieces give the same ids as in one piece, however they are cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.errors import UserError
from data.long_texts import alphabet_meta, bpe_arrays, char_encoder


def test_bpe_of_any_text_cut_anywhere(tiny):
    @given(st.lists(st.text(alphabet='the \n\t\x1c\u2003é,\'s', max_size=12), max_size=8))
    def check(blocks):
        ids = [i for array in bpe_arrays(tiny, blocks) for i in array.tolist()]
        assert ids == tiny.encode_ordinary(''.join(blocks))
    check()


def test_a_text_without_blanks_does_not_pile_up(tiny, monkeypatch):
    monkeypatch.setattr('data.long_texts.LONGEST_PIECE', 1000)
    arrays = list(bpe_arrays(tiny, ['x' * 300] * 20))
    assert len(arrays) == 5 and tiny.decode(np.concatenate(arrays).tolist()) == 'x' * 6000


@pytest.mark.parametrize('text', ['c', 'ac', '\U0010ffff', '\0', '\ud800'])
def test_unknown_characters_are_named(text):
    encode = char_encoder(alphabet_meta('ab🙂')['stoi'])
    with pytest.raises(UserError, match='not in the alphabet of 3'):
        encode(text)


def test_alphabet_must_fit_uint16():
    assert alphabet_meta(map(chr, range(65536)))['vocab_size'] == 65536
    with pytest.raises(UserError, match='65,537 different'):
        alphabet_meta(map(chr, range(65537)))
    with pytest.raises(UserError):
        alphabet_meta('')
