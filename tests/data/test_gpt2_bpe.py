"""GPT-2's vocabulary, from the cache, tiktoken or pip, with fake ranks and no network."""

import hashlib
import threading

import pytest
import tiktoken

from data import bpe
from data.bpe import cache_folder, encode_text, gpt2_encoding
from data.tokenizer import BPETokenizer
from tests.data.support import tar_gz


@pytest.fixture
def source(monkeypatch, tiny_ranks):
    """Serve an sdist with the tiny ranks and expect its hashes; return the list of fetches."""
    sdist = tar_gz({'openai_whisper-1/whisper/assets/multilingual.tiktoken': b'other',
                    'openai_whisper-1/whisper/assets/gpt2.tiktoken': tiny_ranks})
    fetched = []
    monkeypatch.setattr(bpe, 'RANKS_SHA256', hashlib.sha256(tiny_ranks).hexdigest())
    monkeypatch.setattr(bpe, 'fetch_sdist', lambda *args: fetched.append(args) or sdist)
    return fetched


def test_other_source_is_fetched_once_and_cached(source, tiny_ranks, capsys):
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
