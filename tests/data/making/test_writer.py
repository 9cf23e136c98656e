"""Writing a dataset: shards, bounded memory, one at a time, and interruptions of every kind at every moment."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from config.errors import UserError
from config.folder_lock import one_at_a_time
from data.datasets import DATA_ROOT
from data.making.journal import read_state
from data.making.writer import TokenWriter, write_dataset
from data.tokenfiles import is_prepared, open_split, read_meta

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


@pytest.mark.parametrize('error', [KeyboardInterrupt(), ValueError('bug')])
def test_an_exception_midway_leaves_no_folder_that_was_not_there(tmp_path, error):
    with pytest.raises(type(error)), TokenWriter(tmp_path / 'new') as out:
        out.add('train', np.arange(10))
        raise error
    assert names(tmp_path) == []
    (tmp_path / 'old').mkdir()
    with pytest.raises(type(error)), TokenWriter(tmp_path / 'old'):
        raise error
    assert names(tmp_path) == ['old']


def test_who_waits_for_a_folder_that_was_removed_makes_it_again(tmp_path):
    waiting = threading.Thread(target=write, args=(tmp_path / 'new', [[0, 1, 2]]))
    with pytest.raises(ValueError), TokenWriter(tmp_path / 'new'):
        waiting.start()
        time.sleep(0.2)
        raise ValueError
    waiting.join()
    assert 'train.bin' in names(tmp_path / 'new')


class Moments:
    """Counts the moments at which the folder changes, and acts at the number-th: before it, or after it."""

    def __init__(self, monkeypatch, number, act, after=False):
        self.count = 0
        for name in ('replace', 'unlink', 'fsync'):
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name), number, act, after))

    def wrap(self, real, number, act, after):
        def call(*args, **kwargs):
            self.count += 1
            now = self.count == number
            if now and not after:
                act()
            result = real(*args, **kwargs)
            if now and after:
                act()
            return result
        return call


def fail(error):
    def act():
        raise error
    return act


# (shard_tokens, meta) of the dataset that lies there (None: none), and of the one that replaces it
CHANGES = [(None, (0, META)), ((0, META), (0, META)), ((2, None), (4, None)), ((0, META), (3, None)), ((3, None), (0, META))]


def one_of_two(folder, before, after):
    """'old', 'new' or 'incomplete'; fails if files of both are there, or an incomplete one looks complete."""
    now = contents(folder)
    finals = {name: data for name, data in now.items() if not name.startswith('.')}
    if finals == before:
        return 'old'
    if finals == after:
        return 'new'
    assert not is_prepared(folder)
    with pytest.raises(UserError):
        open_split(folder, 'train')
    return 'incomplete'


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def old_and_new(tmp_path, change):
    """Two folders with the older dataset (or none), its files, and those of the new one."""
    (tmp_path / 'a').mkdir()
    if change[0]:
        write(tmp_path / 'a', [[0, 1, 2, 0, 1]], *change[0], val=[1])
    before = contents(tmp_path / 'a')
    write(tmp_path / 'new', [[2] * 11], *change[1], val=[2])
    return tmp_path / 'a', before, contents(tmp_path / 'new')


def moments_of(tmp_path, change):
    """How many moments writing the new dataset has."""
    with pytest.MonkeyPatch.context() as patch:
        moments = Moments(patch, 0, None)
        write(tmp_path / 'count', [[2] * 11], *change[1], val=[2])
    return moments.count + 3  # an older dataset has files to remove


@pytest.mark.parametrize('change', CHANGES)
@pytest.mark.parametrize('after', [False, True])
def test_ctrl_c_at_any_moment_leaves_the_old_dataset_or_the_new_one(tmp_path, change, after):
    found = set()
    for number in range(1, moments_of(tmp_path, change) + 1):
        for folder in ('a', 'new'):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
        folder, old, new = old_and_new(tmp_path, change)
        with pytest.MonkeyPatch.context() as patch:
            Moments(patch, number, fail(KeyboardInterrupt()), after)
            try:
                write(folder, [[2] * 11], *change[1], val=[2])
            except KeyboardInterrupt:
                pass
        assert not [name for name in names(folder) if name.endswith('.tmp')], number
        found.add(one_of_two(folder, old, new))
    assert found == {'old', 'new'}


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='the process that is killed is a fork')
@pytest.mark.parametrize('change', CHANGES)
def test_a_kill_at_any_moment_loses_neither(tmp_path, change):
    found = []
    for number in range(1, moments_of(tmp_path, change) + 1):
        for folder in ('a', 'new'):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
        folder, old, new = old_and_new(tmp_path, change)
        child = os.fork()
        if not child:
            Moments(pytest.MonkeyPatch(), number, lambda: os._exit(9))
            write(folder, [[2] * 11], *change[1], val=[2])
            os._exit(0)
        os.waitpid(child, 0)
        found.append(one_of_two(folder, old, new))
        expected = old if found[-1] == 'old' and 'publish' not in read_state(folder) else new
        with pytest.raises(ZeroDivisionError), TokenWriter(folder):  # a preparation that comes to nothing
            raise ZeroDivisionError
        assert contents(folder) == expected, 'finished, and nothing is left over'
    assert {'old', 'incomplete', 'new'} == set(found)


@pytest.mark.parametrize('number', range(1, 12))
def test_an_error_at_any_moment_is_one_line_and_the_next_run_mends_it(tmp_path, number):
    folder, old, new = old_and_new(tmp_path, CHANGES[1])
    with pytest.MonkeyPatch.context() as patch:
        Moments(patch, number, fail(OSError(28, 'No space left on device')))
        with contextlib.suppress(UserError):
            write(folder, [[2] * 11], 0, META, val=[2])
    expected = old if one_of_two(folder, old, new) == 'old' and 'publish' not in read_state(folder) else new
    with pytest.raises(ZeroDivisionError), TokenWriter(folder):
        raise ZeroDivisionError
    assert contents(folder) == expected
    write(folder, [[2] * 11], 0, META, val=[2])
    assert contents(folder) == new


def test_whose_files_they_are_is_known_first_and_the_marker_last(tmp_path, monkeypatch):
    real, order = os.replace, []
    monkeypatch.setattr(os, 'replace', lambda old, new: order.append(new.name) or real(old, new))
    with TokenWriter(tmp_path, META, 2, source={'made_by': 'me'}) as out:
        out.add('train', np.array([1] * 5))
        out.add('val', np.array([1]))
    assert order == ['.state.tmp', 'source.json', 'meta.pkl', 'train_00001.bin', 'train_00002.bin', 'val.bin',
                     'train_00000.bin']


def test_what_a_killed_preparation_left_is_removed(tmp_path):
    for name in ('.train.bin.tmp', '.val.bin.1234.tmp', '.meta.pkl.tmp', '.train_00003.bin.tmp', '.new-state.tmp'):
        (tmp_path / name).write_bytes(b'ab')
    (tmp_path / '.input.txt.77.tmp').write_text('a download that is under way')
    write(tmp_path, [[1]])
    assert names(tmp_path) == ['.input.txt.77.tmp', 'train.bin', 'val.bin']


@pytest.mark.parametrize('state', ['{"publish": ["../x"], "retire": ["../../y"]}', '{"publish": 5}', '[]', '{', '[' * 100_000,
                                   '{"publish": [["a.bin"]]}', '{"publish": ["val.bin"], "retire": ["/etc/x"]}'])
def test_a_damaged_or_malicious_state_is_no_state(tmp_path, state):
    folder = tmp_path / 'd' / 'e'
    folder.mkdir(parents=True)
    (tmp_path / 'y').write_text('mine')
    (tmp_path / 'd' / '.x.tmp').write_text('mine')
    (folder / '.state.tmp').write_text(state)
    (folder / '.val.bin.tmp').write_bytes(b'ab')
    write(folder, [[1]])
    assert names(folder) == ['train.bin', 'val.bin']
    assert names(tmp_path) == ['d', 'y'] and names(tmp_path / 'd') == ['.x.tmp', 'e']


PROGRAM = """
import sys, time
from pathlib import Path
import numpy as np
from data.making.writer import TokenWriter
with TokenWriter(Path(sys.argv[1]), None) as out:
    out.add('train', np.array([1] * 5))
    print('locked', flush=True)
    sys.stdin.readline()
    out.add('val', np.array([1]))
"""


def test_two_preparations_by_hand_do_not_meet(tmp_path, capsys):
    process = subprocess.Popen([sys.executable, '-c', PROGRAM, str(tmp_path)], cwd=DATA_ROOT.parent, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == 'locked\n'
    threading.Timer(0.3, lambda: (process.stdin.write('\n'), process.stdin.flush())).start()
    start = time.monotonic()
    write(tmp_path, [[2, 2]], meta=META, val=[2])
    assert time.monotonic() - start > 0.2 and process.wait() == 0
    assert 'waiting for another process' in capsys.readouterr().out
    assert tokens_of(tmp_path) == [2, 2] and tokens_of(tmp_path, 'val') == [2] and read_meta(tmp_path) == META
    process.stdin.close()
    process.stdout.close()


def test_the_lock_may_be_taken_again_by_its_thread_but_not_by_another(tmp_path):
    times = []

    def other():
        with one_at_a_time(tmp_path):
            times.append(time.monotonic())

    with one_at_a_time(tmp_path), one_at_a_time(tmp_path / '..' / tmp_path.name):
        write(tmp_path, [[1]])
        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.2)
        assert times == [] and names(tmp_path) == ['.prepare.lock', 'train.bin', 'val.bin']
    thread.join(10)
    assert len(times) == 1 and names(tmp_path) == ['train.bin', 'val.bin'], 'nothing is left of the lock'


def test_a_lock_whose_file_is_gone_is_no_lock(tmp_path):
    """Of three that come one after the other, the second wakes up with the file that the first one removed."""
    first = open(tmp_path / '.prepare.lock', 'a')
    fcntl.flock(first, fcntl.LOCK_EX)
    entered, done = threading.Event(), threading.Event()

    def second():
        with one_at_a_time(tmp_path):
            entered.set()
            done.wait(10)

    thread = threading.Thread(target=second)
    thread.start()
    time.sleep(0.2)
    (tmp_path / '.prepare.lock').unlink()
    first.close()
    assert entered.wait(10)
    with open(tmp_path / '.prepare.lock') as third, pytest.raises(BlockingIOError):
        fcntl.flock(third, fcntl.LOCK_EX | fcntl.LOCK_NB)
    done.set()
    thread.join(10)


def make_file(path):
    path.write_text('')
    return path


def dangling(path):
    path.symlink_to(path.parent / 'nowhere')
    return path


@pytest.mark.parametrize('folder', [
    lambda tmp: make_file(tmp / 'file'), lambda tmp: make_file(tmp / 'file') / 'sub', lambda tmp: Path('/proc/nanokv'),
    lambda tmp: tmp / ('x' * 300), lambda tmp: dangling(tmp / 'link'), lambda tmp: (tmp / 'a' / 'train.bin').mkdir(parents=True)
    or tmp / 'a', lambda tmp: (tmp / 'b' / 'meta.pkl').mkdir(parents=True) or tmp / 'b'])
def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path, folder):
    folder = folder(tmp_path)
    before = sorted(tmp_path.rglob('*'))
    with pytest.raises(UserError) as caught:
        write(folder, [[1]])
    assert str(folder) in str(caught.value) and '\n' not in str(caught.value)
    assert sorted(tmp_path.rglob('*')) == before


def test_a_full_disk_is_one_line_and_the_older_dataset_stays(tmp_path):
    resource = pytest.importorskip('resource')
    write(tmp_path, [[1]])
    before, limits = contents(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        for chunks in ([[3] * 51_000], [[3] * 1000] * 60, [[3] * 1000] * 51):  # some fail when written, some when closed
            with pytest.raises(UserError, match='File too large') as caught:
                write(tmp_path, chunks)
            assert str(tmp_path) in str(caught.value) and contents(tmp_path) == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


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
