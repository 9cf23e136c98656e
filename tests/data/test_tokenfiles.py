"""Token files: round trip, refusals, windows across shards, and pickles that try to run code."""

import pickle

import numpy as np
import pytest

from common.errors import UserError
from data.making.writer import TokenWriter
from data.tokenfiles import open_split, read_meta
from tests.data.support import META, Bomb, ids_of
from tests.helpers.datasets import write_dataset

SPLITS = {'train': np.array([0, 1, 2, 1]), 'val': np.array([2, 0])}


def test_round_trip_is_nanogpts_format(tmp_path):
    folder = tmp_path / 'new' / 'set'
    write_dataset(folder, SPLITS, META)
    assert sorted(p.name for p in folder.iterdir()) == ['meta.pkl', 'train.bin', 'val.bin']
    # little-endian uint16
    assert (folder / 'train.bin').read_bytes() == bytes([0, 0, 1, 0, 2, 0, 1, 0])
    assert pickle.loads((folder / 'meta.pkl').read_bytes()) == META
    tokens = ids_of(folder, 'val')
    assert tokens.dtype == np.uint16 and tokens.tolist() == [2, 0]
    assert read_meta(folder) == META


def test_malicious_pickle_does_not_execute(tmp_path):
    target = tmp_path / 'executed'
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': 3, 'extra': Bomb(target)}))
    with pytest.raises(UserError, match='meta.pkl.*mkdir'):
        read_meta(tmp_path)
    assert not target.exists()
    pickle.loads((tmp_path / 'meta.pkl').read_bytes())
    assert target.exists(), 'the pickle was not malicious: the test proves nothing'


@pytest.mark.parametrize('meta', [
    b'', b'garbage', pickle.dumps(META)[:-9], b'r\xff\xff\xff\x7f.',
    [], {}, {'vocab_size': 0}, {'vocab_size': '3'}, {'vocab_size': True}, {'vocab_size': 70000},
    {'vocab_size': 10, 'dtype': 'int8'}, {'vocab_size': 2**33, 'dtype': 'uint32'},
    {'vocab_size': 10**5000}, {**META, 'itos': None}, {**META, 'vocab_size': 2},
    {'vocab_size': 3, 'stoi': META['stoi']},
    {**META, 'itos': {0: 'a', 1: 'b', 2: 'd'}}, {**META, 'itos': list('abc')},
    {**META, 'stoi': {'a': 0, 'b': 1, 'c': '2'}},
    {'vocab_size': 2, 'stoi': {'a': 0, 'b': 0}, 'itos': {0: 'a', 1: 'b'}},
])
def test_damaged_or_inconsistent_meta(tmp_path, meta):
    (tmp_path / 'meta.pkl').write_bytes(meta if isinstance(meta, bytes) else pickle.dumps(meta))
    with pytest.raises(UserError, match='meta.pkl') as caught:
        read_meta(tmp_path)
    assert '\n' not in str(caught.value)


def test_nanogpt_guarantees_only_vocab_size(tmp_path):
    assert read_meta(tmp_path) is None
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps({'vocab_size': 5, 'source': 'x',
                                                      'unused': [1.5]}))
    assert read_meta(tmp_path) == {'vocab_size': 5, 'source': 'x'}


def write_shards(folder, tokens, size=0):
    with TokenWriter(folder, None, size) as out:
        out.add('train', np.arange(tokens))


def test_tokens_outside_the_vocabulary_are_refused(tmp_path):
    """The vocabulary is the model's, or that of meta.pkl; without either any token is read."""
    np.array([1, 5], dtype='<u2').tofile(tmp_path / 'val.bin')
    assert open_split(tmp_path, 'val').window(0, 2).tolist() == [1, 5]
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps(META))
    assert open_split(tmp_path, 'val', 6).window(0, 2).tolist() == [1, 5]
    for given, known in ((5, 5), (0, 3)):
        tokens = open_split(tmp_path, 'val', given)
        assert tokens.window(0, 1).tolist() == [1]
        with pytest.raises(UserError, match=f'val.bin.*token 5.*vocabulary {known}'):
            tokens.window(0, 2)


@pytest.mark.parametrize('damage, words', [
    (lambda path: path.write_bytes(b'ab'), 'has become shorter'),
    (lambda path: path.unlink(), 'cannot be read: No such file')])
def test_a_file_that_is_damaged_while_it_is_in_use_is_named(tmp_path, damage, words):
    write_shards(tmp_path, 10, 4)
    data = open_split(tmp_path, 'train')
    damage(tmp_path / 'train_00001.bin')
    assert data.window(0, 4).tolist() == [0, 1, 2, 3]
    with pytest.raises(UserError, match=rf"train_00001\.bin' {words}"):
        data.window(2, 4)


def test_numeric_order_needs_no_leading_zeros(tmp_path):
    for number in (0, 1, 2, 10, 9, 8, 7, 6, 5, 4, 3):
        np.array([number], dtype='<u2').tofile(tmp_path / f'train_{number}.bin')
    np.array([9], dtype='<u2').tofile(tmp_path / 'train_backup.bin')  # not a shard
    assert open_split(tmp_path, 'train').window(0, 11).tolist() == list(range(11))


def damaged(name, content):
    """The shards 0 to 2, of which one is replaced or removed, or with one more."""
    def make(folder):
        write_shards(folder, 10, 4)
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
    return make


@pytest.mark.parametrize('make, words', [
    *[(damaged('train_00001.bin', magic.to_bytes(1024, 'little')), ['train_00001.bin', "llm.c's"])
      for magic in (20240520, 20240801)],
    (damaged('train_00001.bin', None), ['train_00002.bin', 'shard 1']),
    (damaged('train_00000.bin', None), ['train_00001.bin', 'shard 0']),
    (damaged('train_00002.bin', b''), ['train_00002.bin', '0 bytes']),
    (damaged('train_00001.bin', b'abc'), ['train_00001.bin', '3 bytes']),
    (damaged('train.bin', b'ab'), ['train.bin', 'shard 0', 'alone']),
    (damaged('train_1.bin', b'ab'), ['train_1.bin', 'shard 2']),
    (lambda folder: None, ['train.bin', 'prepare.py'])])
def test_files_that_cannot_be_read_are_named(tmp_path, make, words):
    make(tmp_path)
    with pytest.raises(UserError) as caught:
        open_split(tmp_path, 'train')
    assert '\n' not in str(caught.value)
    assert [word for word in words if word not in str(caught.value)] == []
