"""Texts in pieces give the ids of the whole, however they are cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.errors import UserError
from data.long_texts import alphabet_meta, bpe_arrays, char_encoder

TEXT = "The  theme\n\n the\tend,\r\n  it's  \n x\x1c the\u2003he 'll\n\n\n" * 3


@pytest.mark.parametrize('size', [1, 2, 3, 7, 50, 10_000])
def test_bpe_in_pieces_is_bpe_of_the_whole(tiny, size):
    blocks = [TEXT[i:i + size] for i in range(0, len(TEXT), size)]
    arrays = list(bpe_arrays(tiny, blocks))
    assert all(array.dtype == np.uint16 and array.size for array in arrays)
    assert np.concatenate(arrays).tolist() == tiny.encode_ordinary(TEXT)


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


def test_characters_by_sorted_order():
    meta = alphabet_meta('banana🙂\n')
    assert meta == {'vocab_size': 5, 'itos': dict(enumerate('\nabn🙂')), 'stoi': {c: i for i, c in enumerate('\nabn🙂')}}
    encode = char_encoder(meta['stoi'])
    assert encode('nab🙂').tolist() == [3, 1, 2, 4] and encode('').tolist() == [] and encode('a').dtype == np.uint16


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
