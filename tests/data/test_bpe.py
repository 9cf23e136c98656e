"""A BPE learned from a text: valid for nanoGPT's meta.pkl, exact, and only of the training text.
GPT-2's vocabulary, from the cache, tiktoken or pip, with fake ranks and no network."""
import hashlib
import threading

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from data import bpe
from data.bpe import (
    END_OF_TEXT, cache_folder, encode_text, gpt2_encoding, learn_bpe, learned_encoding)
from data.tokenfiles import TokenSplit, meta_problem
from data.tokenizer import BPETokenizer, alphabet_meta, bytes_per_token, load_tokenizer
from interop.tokenizer_files import save_tokenizer, tokenizer_in
from tests.data.support import tar_gz

TEXT = ('The cat that sat there thought of the other thing, then of others; café, 你好.\n\n' * 5
        + 'MACBETH. Is this a dagger which I see before me, the handle toward my hand?\n')
META = learn_bpe([TEXT[:200], TEXT[200:]], 320)
TOKENIZER = load_tokenizer(META)


def test_meta_is_nanogpts():
    assert meta_problem(META) == '' and META['vocab_size'] == len(META['itos']) == 320
    assert [META['stoi'][chr(byte)] for byte in range(256)] == list(range(256))
    assert META['stoi'][END_OF_TEXT] == 319 and META['stoi'][' the'] > 255
    ids = TOKENIZER.encode('the other dagger\n')
    assert ''.join(META['itos'][i] for i in ids) == 'the other dagger\n' and len(ids) < 12
    short = learn_bpe(['ab'], 1000)
    assert list(short['stoi'])[256:] == ['ab', END_OF_TEXT] and short['vocab_size'] == 258


@given(st.one_of(st.text(), st.text(alphabet=sorted(set(TEXT)), min_size=5)))
def test_any_text_round_trips_and_the_special_token_is_not_made_from_it(text):
    ids = TOKENIZER.encode(text + END_OF_TEXT, special=False)
    assert TOKENIZER.decode(ids) == text + END_OF_TEXT and 319 not in ids
    assert TOKENIZER.encode(END_OF_TEXT) == [319]


def test_half_a_surrogate_pair_is_a_replacement_character():
    assert learn_bpe(['a \ud83d b'], 300) == learn_bpe(['a \ufffd b'], 300)
    for ids in (TOKENIZER.encode('a \ud83d b'), encode_text(TOKENIZER.encoding, 'a \ud83d b')):
        assert TOKENIZER.decode(ids) == 'a \ufffd b'


def test_bytes_per_token_of_a_split(tmp_path):
    text = 'the cat, café' + END_OF_TEXT
    np.array(TOKENIZER.encode(text), dtype='<u2').tofile(tmp_path / 'val.bin')
    tokens = TokenSplit([tmp_path / 'val.bin'])
    assert bytes_per_token(META, tokens) == len('the cat, café'.encode()) / len(tokens)
    chars = {'vocab_size': 400, 'stoi': {'é': 0}, 'itos': {0: 'é'}}
    np.zeros(3, dtype='<u2').tofile(tmp_path / 'val.bin')
    assert bytes_per_token(chars, TokenSplit([tmp_path / 'val.bin'])) == 2
    assert bytes_per_token(None, tokens) == bytes_per_token({'vocab_size': 9}, tokens) == 0


@pytest.mark.parametrize('long', ['ab', '12', '+-', ' \t'])
def test_long_words_are_cut_to_learn_tokens(monkeypatch, capsys, long):
    """The trainer's time grows with the square of the length of a word."""
    lengths = []

    class Recorder:
        def __init__(self, model):
            self.get_vocab = dict

        def train_from_iterator(self, texts, trainer):
            lengths.extend(map(len, texts))

    monkeypatch.setattr('tokenizers.Tokenizer', Recorder)
    learn_bpe(['a short text', 'before ' + long * 2500 + 'after', '<p>' * 1000], 300)
    assert max(lengths[:-1]) < 1010 and sum(lengths) == 12 + 7 + 5000 + 5 + 3000
    assert lengths[-1] == 3000, 'many short words'
    err = capsys.readouterr().err
    assert 'more than 1,000 characters were cut' in err and err.count('\n') == 1


def test_export_and_back(tmp_path):
    save_tokenizer(TOKENIZER, tmp_path, 256)
    back = tokenizer_in(tmp_path, 320)
    assert isinstance(back, BPETokenizer) and back.vocab_size == 320
    text = TEXT + 'Unseen: Ünïcödé 🙂' + END_OF_TEXT
    assert back.encode(text) == TOKENIZER.encode(text)


def test_a_large_alphabet_fits_uint16():
    assert alphabet_meta(map(chr, range(65536)))['vocab_size'] == 65536


@pytest.mark.parametrize('call, words', [
    *((lambda stoi=stoi: learned_encoding(stoi), 'byte pair encoding') for stoi in (
        {chr(b): b for b in range(256)}, {chr(b): b for b in range(1, 256)} | {END_OF_TEXT: 0},
        {chr(b): b for b in range(257)} | {END_OF_TEXT: 257})),
    (lambda: alphabet_meta(map(chr, range(65537))), '65,537 different'),
    (lambda: alphabet_meta(''), '0 different')])
def test_what_is_refused(call, words):
    with pytest.raises(UserError, match=words):
        call()


# -- GPT-2's vocabulary

@pytest.fixture
def source(monkeypatch, tiny_ranks):
    """Serve an sdist with the tiny ranks and expect its hashes; return the list of fetches."""
    sdist = tar_gz({'openai_whisper-1/whisper/assets/multilingual.tiktoken': b'other',
                    'openai_whisper-1/whisper/assets/gpt2.tiktoken': tiny_ranks})
    fetched = []
    monkeypatch.setattr(bpe, 'RANKS_SHA256', hashlib.sha256(tiny_ranks).hexdigest())
    monkeypatch.setattr(bpe, 'fetch_sdist', lambda *args: fetched.append(args) or sdist)
    return fetched


def test_the_other_source_of_gpt2s_is_fetched_once_and_cached(source, tiny_ranks, capsys):
    encoding = gpt2_encoding()
    assert encoding.n_vocab == 261 and encoding.eot_token == 260
    assert encoding.encode_ordinary('the  the\n\n') == [ord('t'), 256, ord(' '), 258, 259]
    (requirement, sha256, _), = source
    assert (requirement, sha256) == ('openai-whisper==20250625', bpe.SDIST_SHA256)
    assert [path.read_bytes() for path in cache_folder().iterdir()] == [tiny_ranks]
    captured = capsys.readouterr()
    # stdout is reserved for samples and JSON
    assert captured.out == '' and 'ConnectionError' in captured.err
    assert gpt2_encoding().encode('the') == encoding.encode('the') and len(source) == 1
    path = cache_folder() / 'gpt2.tiktoken'
    path.write_bytes(tiny_ranks[:-20])  # damaged
    assert gpt2_encoding().n_vocab == 261 and len(source) == 2 and path.read_bytes() == tiny_ranks


def test_a_cache_that_cannot_be_written_is_done_without(source, monkeypatch, tmp_path):
    (tmp_path / 'file').write_text('')
    monkeypatch.setenv('NANOKV_CACHE', str(tmp_path / 'file'))
    assert gpt2_encoding().n_vocab == 261 and (tmp_path / 'file').read_text() == ''


def test_a_download_that_hangs_is_given_up(source, monkeypatch, capsys):
    hang = threading.Event()
    monkeypatch.setattr(tiktoken, 'get_encoding', lambda name: hang.wait(60))
    monkeypatch.setattr(bpe, 'WAIT', 0.1)
    assert gpt2_encoding().n_vocab == 261 and 'TimeoutError' in capsys.readouterr().err
    hang.set()


def test_runs_of_blanks_longer_than_tiktoken_can_take(tiny):
    text = 'a' + ' ' * 2_500_000 + 'b' + '\n' * 100_001
    assert tiny.decode(encode_text(tiny, text).tolist()) == text
    assert tiny.decode(BPETokenizer(tiny).encode(text)) == text
