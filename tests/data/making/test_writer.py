"""Writing a dataset: shards, bounded memory, and interruptions of every kind at every moment."""

import contextlib
import itertools
import os
import shutil

import numpy as np
import pytest

from common.errors import UserError
from data.making.writer import TokenWriter
from data.tokenfiles import is_prepared, open_split
from tests.data.support import META, contents
from tests.helpers.datasets import write_dataset


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write(folder, chunks, shard_tokens=0, meta=None, val=(7,)):
    with TokenWriter(folder, meta, shard_tokens) as out:
        for chunk in chunks:
            out.add('train', np.array(chunk, dtype=np.int64))
        out.add('val', np.array(val))


@pytest.mark.parametrize('shard_tokens, shards', [
    (10, 1), (9, 2), (3, 4), (0, 0)])
def test_chunks_and_shards_of_any_size_give_the_same_tokens(tmp_path, shard_tokens, shards):
    write(tmp_path, [[0, 1, 2], [], [3], list(range(4, 10))], shard_tokens)
    train = [f'train_{i:05d}.bin' for i in range(shards)] or ['train.bin']
    assert names(tmp_path) == [*train, 'val.bin']
    data = open_split(tmp_path, 'train')
    assert len(data) == 10 and is_prepared(tmp_path)
    for start, n in itertools.combinations_with_replacement(range(11), 2):
        window = data.window(start, n - start)
        assert window.dtype == np.uint16 and window.tolist() == list(range(start, n))
    for start, n in ((-1, 2), (9, 2), (11, 0), (0, -1), (0, 11)):
        with pytest.raises(IndexError):
            data.window(start, n)


def test_a_link_to_a_folder_is_not_a_preparation(tmp_path):
    """The files in it would be deleted."""
    other, folder = tmp_path / 'other', tmp_path / 'out'
    other.mkdir()
    folder.mkdir()
    (other / 'precious').write_text('a')
    (folder / '.new.tmp').symlink_to(other)
    with pytest.raises(UserError, match='symbolic link'), TokenWriter(folder):
        pass
    assert names(other) == ['precious'] and names(folder) == ['.new.tmp']


def test_unfit_tokens_and_bad_settings_are_refused_and_nothing_is_left(tmp_path):
    for ids in ([65536], [-1], [0.5], [[1]]):
        with pytest.raises(UserError), TokenWriter(tmp_path) as out:
            out.add('train', np.array([1]))
            out.add('train', np.array(ids))
    with pytest.raises(UserError, match='0 to 2'):
        write(tmp_path, [[3]], meta=META)
    with pytest.raises(UserError, match='vocab_size'):
        TokenWriter(tmp_path, {'vocab_size': 0})
    with pytest.raises(UserError, match='no train tokens'):
        write(tmp_path, [[]])
    with pytest.raises(UserError, match='no val tokens'):
        write_dataset(tmp_path, {'train': np.array([1]), 'val': np.array([])}, None)
    assert names(tmp_path) == []


class Moments:
    """Count the changes to the folder, and end before change `number`, by an error or, if that is
    None, as by a kill."""

    def __init__(self, monkeypatch, number, error=None):
        self.count, self.number, self.error = 0, number, error
        for name in ('replace', 'unlink', 'mkdir'):
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name)))

    def wrap(self, real):
        def call(*args, **kwargs):
            self.count += 1
            if self.count == self.number and self.error is None:
                os._exit(9)
            if self.count == self.number:
                raise self.error
            return real(*args, **kwargs)
        return call


# (shard_tokens, meta) of the older dataset and of the one that replaces it
CHANGES = [((2, None), (4, None)), ((3, None), (0, META))]


def one_of_two(folder, before, after):
    """Return 'old', 'new' or 'incomplete'; fail if the folder looks complete but mixes both."""
    dataset = {name: data for name, data in contents(folder).items() if not name.startswith('.')}
    if dataset == before:
        return 'old'
    if dataset == after:
        return 'new'
    assert not is_prepared(folder)
    with pytest.raises(UserError):
        open_split(folder, 'train')
    return 'incomplete'


@pytest.mark.parametrize('change, error', [
    (CHANGES[0], None), (CHANGES[1], None), (CHANGES[1], KeyboardInterrupt()),
    (CHANGES[0], OSError(28, 'No space left on device'))])
def test_an_end_at_any_moment_leaves_no_mixture(tmp_path, change, error):
    """The next preparation starts again, and removes what is left."""
    folder, states = tmp_path / 'a', set()
    with pytest.MonkeyPatch.context() as patch:
        moments = Moments(patch, 0)
        write(tmp_path / 'new', [[2] * 11], *change[1], val=[2])
    new = contents(tmp_path / 'new')
    for number in range(1, moments.count + 7):  # removing an older dataset's files adds changes
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, [[0, 1, 2, 0, 1]], *change[0], val=[1])
        old, child = contents(folder), os.fork() if error is None else 0
        if child:
            os.waitpid(child, 0)
        else:
            with pytest.MonkeyPatch.context() as patch:
                Moments(patch, number, error)
                with contextlib.suppress(KeyboardInterrupt, UserError):
                    write(folder, [[2] * 11], *change[1], val=[2])
            if error is None:
                os._exit(0)
        states.add(one_of_two(folder, old, new))
        write(folder, [[2] * 11], *change[1], val=[2])
        assert contents(folder) == new and '.new.tmp' not in names(folder), number
    assert states == {'old', 'new', 'incomplete'}


def test_a_full_disk_is_one_line_and_the_older_dataset_stays(tmp_path):
    resource = pytest.importorskip('resource')
    write(tmp_path, [[1]])
    before, limits = contents(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:  # some fail on write, some on close
        for chunks in ([[3] * 51_000], [[3] * 1000] * 60, [[3] * 1000] * 51):
            with pytest.raises(UserError, match='File too large') as caught:
                write(tmp_path, chunks)
            assert str(tmp_path) in str(caught.value) and contents(tmp_path) == before
            assert names(tmp_path) == ['train.bin', 'val.bin']
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
