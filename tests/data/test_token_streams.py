"""Tokens that arrive in arrays and windows over shards: bounded memory, borders, damage, interruption."""

import os
import tracemalloc

import numpy as np
import pytest

from config.errors import UserError
from data.tokenfiles import TokenWriter, is_prepared, open_split, read_meta, write_dataset

META = {'vocab_size': 3, 'itos': {0: 'a', 1: 'b', 2: 'c'}, 'stoi': {'a': 0, 'b': 1, 'c': 2}}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def tokens_of(folder, split='train'):
    data = open_split(folder, split)
    return data.window(0, len(data)).tolist()


def write(folder, chunks, shard_tokens=0, meta=None, val=(7,)):
    with TokenWriter(folder, meta, shard_tokens) as out:
        for chunk in chunks:
            out.add('train', np.array(chunk, dtype=np.int64))
        out.add('val', np.array(val))


@pytest.mark.parametrize('shard_tokens, files', [
    (0, ['train.bin']), (100, ['train_00000.bin']), (10, ['train_00000.bin']), (9, ['train_00000.bin', 'train_00001.bin']),
    (3, [f'train_{i:05d}.bin' for i in range(4)]), (1, [f'train_{i:05d}.bin' for i in range(10)])])
def test_chunks_and_shards_of_any_size_give_the_same_tokens(tmp_path, shard_tokens, files):
    write(tmp_path, [[0, 1, 2], [], [3], list(range(4, 10))], shard_tokens)
    assert names(tmp_path) == [*files, 'val.bin']
    data = open_split(tmp_path, 'train')
    assert len(data) == 10 and is_prepared(tmp_path)
    for start in range(11):
        for n in range(11 - start):
            window = data.window(start, n)
            assert window.dtype == np.uint16 and window.tolist() == list(range(start, start + n))


def test_windows_outside_are_refused_not_cut(tmp_path):
    write(tmp_path, [range(10)], 4)
    data = open_split(tmp_path, 'train')
    for start, n in [(-1, 2), (9, 2), (11, 0), (0, -1), (0, 11)]:
        with pytest.raises(IndexError):
            data.window(start, n)


def test_a_window_of_one_file_is_a_view_of_the_map(tmp_path):
    write(tmp_path, [range(10)])
    data = open_split(tmp_path, 'train')
    window = data.window(2, 3)
    assert type(window) is np.ndarray and not window.flags.owndata and not window.flags.writeable
    assert np.shares_memory(window, data.window(0, 10))


def test_only_what_is_read_is_mapped(tmp_path):
    write(tmp_path, [range(300)], 1)
    data = open_split(tmp_path, 'train')
    before = len(os.listdir('/proc/self/fd')) if os.path.isdir('/proc/self/fd') else None
    assert data.window(150, 3).tolist() == [150, 151, 152]
    if before is None:
        pytest.skip('no /proc to count file descriptors in')
    assert len(os.listdir('/proc/self/fd')) - before == 3
    data.window(0, 300)
    assert len(os.listdir('/proc/self/fd')) - before <= data.MAX_MAPPED + 3


def test_numeric_order_needs_no_leading_zeros(tmp_path):
    for number in (0, 1, 2, 10, 9, 8, 7, 6, 5, 4, 3):
        np.array([number], dtype='<u2').tofile(tmp_path / f'train_{number}.bin')
    np.array([9], dtype='<u2').tofile(tmp_path / 'train_backup.bin')  # no shard
    assert tokens_of(tmp_path) == list(range(11))


@pytest.mark.parametrize('damage, words', [
    (lambda d: (d / 'train_00001.bin').unlink(), ['train_00001.bin', 'train_00002.bin']),
    (lambda d: (d / 'train_00000.bin').unlink(), ['train_00000.bin']),
    (lambda d: (d / 'train_00002.bin').write_bytes(b''), ['train_00002.bin', '0 bytes']),
    (lambda d: (d / 'train_00001.bin').write_bytes(b'abc'), ['train_00001.bin', '3 bytes']),
    (lambda d: (d / 'train.bin').write_bytes(b'ab'), ['train.bin', 'train_00000.bin']),
    (lambda d: (d / 'train_1.bin').write_bytes(b'ab'), ['train_1.bin', 'train_00001.bin', 'same number']),
    (lambda d: [path.unlink() for path in d.glob('train*')], ['train.bin', 'prepare.py']),
])
def test_damaged_shards_are_named(tmp_path, damage, words):
    write(tmp_path, [range(10)], 4)
    damage(tmp_path)
    with pytest.raises(UserError) as caught:
        open_split(tmp_path, 'train')
    assert all(word in str(caught.value) for word in words) and '\n' not in str(caught.value)


@pytest.mark.parametrize('split, ids', [('train', [65536]), ('train', [-1]), ('train', [0.5]), ('train', [[1]]),
                                        ('../evil', [1]), ('train_0', [1]), ('', [1])])
def test_unfit_tokens_are_refused_and_nothing_is_left(tmp_path, split, ids):
    with pytest.raises(UserError), TokenWriter(tmp_path) as out:
        out.add('train', np.array([1]))
        out.add(split, np.array(ids))
    assert names(tmp_path) == []


def test_ids_beyond_the_vocabulary_and_bad_settings_are_refused(tmp_path):
    with pytest.raises(UserError, match='0 to 2'):
        write(tmp_path, [[3]], meta=META)
    with pytest.raises(UserError, match='shard_tokens=-1'):
        TokenWriter(tmp_path, shard_tokens=-1)
    with pytest.raises(UserError, match='vocab_size'):
        TokenWriter(tmp_path, {'vocab_size': 0})
    with pytest.raises(UserError, match='no train tokens'):
        write(tmp_path, [[]])
    assert names(tmp_path) == []


@pytest.mark.parametrize('error', [KeyboardInterrupt(), OSError('disk full'), ValueError('bug')])
def test_an_exception_midway_keeps_the_older_dataset(tmp_path, error):
    write(tmp_path, [[0, 1, 2]], 2, META, val=[1])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(type(error)), TokenWriter(tmp_path, None, 4) as out:
        out.add('val', np.array([9]))
        out.add('train', np.arange(10))
        raise error
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize('number', range(1, 5))
def test_interrupted_publication_never_looks_complete(tmp_path, monkeypatch, number):
    write(tmp_path, [range(100, 110)], 2)
    real, calls = os.replace, []

    def replace(*args):
        calls.append(args)
        if len(calls) == number:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(os, 'replace', replace)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, [range(10)], 4)
    assert not is_prepared(tmp_path) and not [name for name in names(tmp_path) if name.endswith('.tmp')]
    with pytest.raises(UserError):
        open_split(tmp_path, 'train')
    monkeypatch.setattr(os, 'replace', real)
    write(tmp_path, [range(10)], 4)
    assert tokens_of(tmp_path) == list(range(10)) and len(names(tmp_path)) == 4


def test_no_file_of_an_older_dataset_survives(tmp_path):
    write(tmp_path, [range(10)], 2, val=[5])
    write(tmp_path, [range(5)], 3)
    assert names(tmp_path) == ['train_00000.bin', 'train_00001.bin', 'val.bin'] and tokens_of(tmp_path) == list(range(5))
    write_dataset(tmp_path, {'train': np.array([1]), 'val': np.array([2])}, META)
    assert names(tmp_path) == ['meta.pkl', 'train.bin', 'val.bin'] and tokens_of(tmp_path) == [1]
    write(tmp_path, [[4]], 3)
    assert names(tmp_path) == ['train_00000.bin', 'val.bin'] and read_meta(tmp_path) is None
    assert tokens_of(tmp_path, 'val') == [7]


@pytest.mark.parametrize('shard_tokens', [0, 1_000_000])
def test_memory_is_bounded(tmp_path, shard_tokens):
    """20 MB through chunks of 20 kB, and windows of them back."""
    chunk = np.arange(10_000, dtype=np.uint16)
    tracemalloc.start()
    try:
        with TokenWriter(tmp_path, shard_tokens=shard_tokens) as out:
            for _ in range(1000):
                out.add('train', chunk)
        data = open_split(tmp_path, 'train')
        assert len(data) == 10_000_000
        assert all((data.window(start, 10_000) == chunk).all() for start in range(0, len(data), 500_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
