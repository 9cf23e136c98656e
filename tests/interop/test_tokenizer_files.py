"""Exported tokenizers, loaded by Hugging Face, give the same ids as ours."""
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data.bpe import END_OF_TEXT, learn_bpe, learned_encoding
from interop.tokenizer_files import byte_pairs, characters, merge_of

TEXT = ('the cat that sat there thought then of other things; 1234, she\'ll say  "the"\n\n\t'
        'café über 你好 the\u00a0end ')
ENCODING = learned_encoding(learn_bpe([TEXT * 3], 376)['stoi'])
FAST = byte_pairs(ENCODING)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.text(alphabet=sorted(set(TEXT)), min_size=5),
                 st.text(alphabet=" \n\tthe's1", min_size=3)))
def test_byte_pairs(text):
    ids = ENCODING.encode(text, disallowed_special=())
    assert FAST.encode(text).ids == ids
    assert FAST.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_and_merges():
    ids = FAST.encode(f'the{END_OF_TEXT}the').ids
    assert ids == ENCODING.encode(f'the{END_OF_TEXT}the', allowed_special='all')
    assert ENCODING.eot_token in ids
    ranks = ENCODING._mergeable_ranks
    assert len(ranks) > 300 and FAST.get_vocab_size() == len(ranks) + 1
    for token in ranks:
        if len(token) > 1:
            first, second = merge_of(token, ranks)
            assert first + second == token and max(ranks[first], ranks[second]) < ranks[token]


def test_a_vocabulary_that_no_merging_makes_is_refused():
    ranks = {b'a': 0, b'b': 1, b'ab': 3, b'abab': 2}
    with pytest.raises(UserError, match="b'abab' .* is not made by merging"):
        merge_of(b'abab', ranks)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet='\n\t aé你🙂[]UNK.'))
def test_characters(text):
    alphabet = '\n\t aé你🙂[]UNK.'
    stoi = {c: i for i, c in enumerate(alphabet)}
    tokenizer = characters(stoi)
    ids = tokenizer.encode(text).ids
    assert ids == [stoi[c] for c in text] and tokenizer.decode(ids) == text
