"""Identifiers of source code, their distances and their losses, against examples made by hand."""
import numpy as np
import pytest

from config.errors import UserError
from data.bpe import encode_documents, learn_bpe, learned_encoding
from data.tokenizer import BPETokenizer, CharTokenizer
from lab.ablation.identifiers import NEW, Identifiers, find_identifiers, loss_by_distance, names_of

FILES = ['def __init__(self, naïve_x):\n    # self\n    self.naïve_x = "naïve_x"\n',
         'for naïve_x in f(3):\n    pass\n', 'import os\nif (\n', '']


def named(source):
    text = source.encode()
    return [(name, text[start:end].decode()) for name, start, end in names_of(source)]


def test_names_are_identifiers_without_keywords_strings_and_comments():
    assert [name for name, _ in named(FILES[0])] == [
        '__init__', 'self', 'naïve_x', 'self', 'naïve_x']
    for source in (*FILES, 'é = "é"; b = é\r\nb\x0c = 1\n'):
        assert all(name == text for name, text in named(source))
    assert [name for name, _ in named(FILES[2])] == ['os']  # until the end that is missing
    assert [name for name, _ in named('x = f"{y} {z!r:>{w}}" + v\n')] == ['x', 'v']


@pytest.mark.parametrize('n_tokens', [257, 300])
def test_tokens_of_identifiers(n_tokens):
    """The tokens from start to end hold the identifier, and no token less would."""
    tokenizer = BPETokenizer(learned_encoding(learn_bpe(FILES, n_tokens)['stoi']))
    ids = encode_documents(tokenizer.encoding, FILES)
    found = find_identifiers(ids, tokenizer)
    names = [name for source in FILES for name, _ in named(source)]
    assert len(found.names) == len(names)
    assert len(set(zip(found.names.tolist(), names))) == len(set(names)) == len(set(found.names))
    for start, end, name in zip(found.starts, found.ends, names):
        pieces = [tokenizer.token_bytes(i) for i in ids[start:end]]
        assert name.encode() in b''.join(pieces)
        for less in (pieces[1:], pieces[:-1]):
            assert name.encode() not in b''.join(less)


def test_loss_by_distance_to_the_last_use_in_the_window():
    """Window 0 holds tokens 0 to 8, window 1 tokens 8 to 16. Token t costs t nats."""
    identifiers = Identifiers(starts=np.array([0, 2, 5, 7, 8, 10, 15]),
                              ends=np.array([1, 4, 6, 8, 10, 11, 18]),
                              names=np.array([0, 1, 0, 1, 1, 0, 1]))
    nats = np.array([range(1, 9), range(9, 17)], float)
    found = loss_by_distance(nats, np.array([0, 8]), identifiers)
    # 0 at 0 is the context's first token, no target; 1 at 8 ends beyond window 0 and has no loss
    # for its first token in window 1; 1 at 15 ends beyond window 1
    assert list(found.items()) == [(4, {'count': 2, 'nats': (5 + 7) / 2}),
                                   (NEW, {'count': 2, 'nats': (5 + 10) / 2})]
    with pytest.raises(UserError, match='BPE'):
        find_identifiers(np.array([0]), CharTokenizer({'a': 0}, {0: 'a'}))
