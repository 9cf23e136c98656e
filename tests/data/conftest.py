"""Tests of data/ use no network and no user cache; a tiny encoding replaces GPT-2's."""
import base64
import importlib.util
import json
import urllib.error
import urllib.request

import pytest
import tiktoken

from common.errors import UserError
from data import bpe
from data.datasets import DATA_ROOT
from tests.data.support import DOCUMENTS, contents


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path_factory):
    def refuse(error):
        def call(*args, **kwargs):
            raise error
        return call

    monkeypatch.setenv('NANOKV_CACHE', str(tmp_path_factory.mktemp('cache')))
    monkeypatch.setattr(urllib.request, 'urlopen',
                        refuse(urllib.error.URLError('no network in tests')))
    monkeypatch.setattr(tiktoken, 'get_encoding', refuse(ConnectionError('no network in tests')))
    monkeypatch.setattr(bpe, 'fetch_sdist', refuse(UserError('no network in tests')))


@pytest.fixture(scope='session')
def tiny_ranks():
    """A .tiktoken file: the 256 bytes and four merges, so that <|endoftext|> is 260."""
    tokens = [bytes([i]) for i in range(256)] + [b'he', b' t', b' the', b'\n\n']
    return b''.join(base64.b64encode(token) + b' %d\n' % rank for rank, token in enumerate(tokens))


@pytest.fixture
def tiny(tiny_ranks, monkeypatch):
    """The tiny encoding, which replaces GPT-2's in every module."""
    encoding = bpe.encoding_of(tiny_ranks)
    for module in ('data.making.stream', 'data.bpe', 'data.tokenizer'):
        monkeypatch.setattr(f'{module}.gpt2_encoding', lambda: encoding)
    return encoding


@pytest.fixture
def load_prepare():
    """Return a function that imports prepare.py of the shipped dataset with a given name."""
    def load(name):
        spec = importlib.util.spec_from_file_location(f'{name}_prepare',
                                                      DATA_ROOT / name / 'prepare.py')
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    return load


@pytest.fixture
def dump(tmp_path):
    """A dump of 400 documents."""
    path = tmp_path / 'dump.jsonl'
    path.write_text(''.join(json.dumps({'text': text, 'id': i}) + '\n'
                            for i, text in enumerate(DOCUMENTS)))
    return path


@pytest.fixture
def run(load_prepare, tiny, dump, tmp_path):
    """Return a function that prepares the dataset with given options: {file: bytes}."""
    def run(*argv, name='openwebtext', source=dump):
        out = tmp_path / 'out'
        given = ['--from', str(source)] if source else []
        load_prepare(name).main([*given, f'--out={out}', '--workers=1', '--val=0.1', *argv])
        return contents(out)
    return run
