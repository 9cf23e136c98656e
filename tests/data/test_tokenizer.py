"""Tokenizers: round trips, streaming, and errors that list the characters."""

import pytest
import tiktoken

from common.errors import UserError
from data.tokenizer import BPETokenizer, CharTokenizer, load_tokenizer

TEXT = 'hé €uro 🙂 ok'


@pytest.fixture
def char():
    chars = '\n abcé'
    stoi = {c: i for i, c in enumerate(chars)}
    return load_tokenizer({'vocab_size': 8, 'stoi': stoi, 'itos': dict(enumerate(chars))})


@pytest.fixture
def bpe():
    # the last two bytes of the euro sign
    ranks = {bytes([i]): i for i in range(256)} | {b'he': 256, b'\x82\xac': 257}
    special = {'<|endoftext|>': 258}
    return BPETokenizer(tiktoken.Encoding('tiny', pat_str=r'\S+|\s+', mergeable_ranks=ranks,
                                           special_tokens=special))


def test_char_round_trip(char):
    assert isinstance(char, CharTokenizer)
    assert char.encode('ab\né') == [2, 3, 0, 5]
    assert char.decode([2, 3, 0, 5]) == 'ab\né'
    assert char.vocab_size == 8
    stream = char.stream()
    assert [stream(i) for i in [5, 7]] == ['é', '\ufffd'] and stream.end() == ''
    assert char.decode([7, -1, 99]) == '\ufffd' * 3


def test_char_names_unknown_characters(char):
    with pytest.raises(UserError) as caught:
        char.encode('a€b€ñ\u2028')
    message = str(caught.value)
    assert "3 characters that the model's alphabet lacks: '€', 'ñ', '\\u2028'" in message
    assert "(known: '\\n abcé')" in message and len(message.splitlines()) == 1


def test_bpe_stream_waits_for_whole_characters(bpe):
    stream = bpe.stream()
    assert [stream(i) for i in bpe.encode('€')] == ['', '€']
    pieces = [stream(i) for i in bpe.encode(TEXT)]
    assert ''.join(pieces) == TEXT and not any('\ufffd' in piece for piece in pieces)
    assert (stream(0xE2), stream.end(), stream.end()) == ('', '\ufffd', '')


@pytest.mark.parametrize('ids, text', [
    ([0xE2, ord('a')], '\ufffda'), ([0xE2], '\ufffd'),
    *(([0xE2, unknown, ord('b')], '\ufffd\ufffdb') for unknown in (300, -1, 2 ** 40))])
def test_bpe_incomplete_characters_and_padding_ids_do_not_crash(bpe, ids, text):
    assert bpe.decode(ids) == text


def test_meta_without_alphabet_means_gpt2(bpe, monkeypatch):
    asked = []
    monkeypatch.setattr(tiktoken, 'get_encoding', lambda name: asked.append(name) or bpe.encoding)
    assert isinstance(load_tokenizer(None), BPETokenizer)
    assert isinstance(load_tokenizer({'vocab_size': 50304}), BPETokenizer)
    assert asked == ['gpt2', 'gpt2']
