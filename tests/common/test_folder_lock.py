"""A folder has one writer at a time, however the previous one ended."""
import contextlib
import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common import folder_lock as lock
from common.errors import UserError
from common.folder_lock import only_writer

ROOT = Path(lock.__file__).resolve().parents[1]
HOLDER = '''
import sys, time
from pathlib import Path
from common.folder_lock import only_writer
with only_writer(Path(sys.argv[1]), ''):
    Path(sys.argv[1], 'written').touch()
    print('held', flush=True)
    time.sleep(60)
'''


def test_a_second_writer_is_told_who_has_it_until_that_one_is_killed(tmp_path):
    out = tmp_path / 'out'
    holder = subprocess.Popen([sys.executable, '-c', HOLDER, str(out)], cwd=ROOT,
                              stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == 'held\n'
    with pytest.raises(UserError) as refused, only_writer(out, 'Wait.'):
        raise AssertionError('two writers')
    told = str(refused.value)
    assert told.startswith(f'{out} is being written by process {holder.pid} on ')
    assert ' since 20' in told and '-c' in told and told.endswith('. Wait.')
    assert {path.name for path in out.iterdir()} == {'.lock', 'written'}  # untouched
    holder.kill()
    holder.wait()
    assert (out / '.lock').exists()
    with only_writer(out, ''):
        assert f'process {os.getpid()} on ' in (out / '.lock').read_text()
    assert not (out / '.lock').exists()


def test_a_folder_in_which_nothing_was_written_is_gone_again(tmp_path):
    with pytest.raises(KeyError), only_writer(tmp_path / 'a' / 'out', ''):
        raise KeyError
    assert not (tmp_path / 'a' / 'out').exists()
    (tmp_path / 'empty').mkdir()
    with only_writer(tmp_path / 'empty', ''):
        pass
    assert (tmp_path / 'empty').exists()  # it was there before


def test_of_many_at_once_one_has_it(tmp_path):
    """Threads, each with its own open file, also while the folder is removed and created."""
    inside, most = [], []

    def write(_):
        times = 0
        while times < 20:
            with contextlib.suppress(UserError), only_writer(tmp_path / 'out', ''):
                inside.append(1)
                most.append(len(inside))
                inside.pop()
                times += 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert most == [1] * 80


@pytest.mark.parametrize('name, kind', [
    ('.lock', 'link'), ('.lock', 'link to nothing'), ('.lock', 'hard link'),
    ('.lock', 'named pipe'), ('.prepare.lock', 'link')])
def test_only_a_regular_file_is_a_lock(tmp_path, name, kind):
    """In a folder from somebody else it may be a link to a file of the user."""
    victim, folder = tmp_path / 'victim', tmp_path / 'out'
    folder.mkdir()
    if kind != 'link to nothing':
        victim.write_text('precious')
    if kind == 'hard link':
        (folder / name).hardlink_to(victim)
    elif kind == 'named pipe':
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(victim)
    held = only_writer(folder, '') if name == '.lock' else lock.one_at_a_time(folder)
    with pytest.raises(UserError, match=f'{name}'), held:
        pass
    assert not victim.exists() if kind == 'link to nothing' else victim.read_text() == 'precious'


def test_a_system_without_locks_is_told_and_other_errors_are_refused(monkeypatch, tmp_path, capsys):
    (tmp_path / 'file').touch()
    with pytest.raises(UserError, match='cannot be written to'):
        with only_writer(tmp_path / 'file' / 'out', ''):
            pass

    def flock(file, how):
        raise error
    monkeypatch.setattr('fcntl.flock', flock)
    error = OSError(errno.ENOLCK, 'No locks available')
    with only_writer(tmp_path / 'out', ''):
        assert 'has no locks' in capsys.readouterr().err
    error = OSError(errno.EIO, 'Input/output error')
    with pytest.raises(UserError, match='Input/output error'), only_writer(tmp_path, ''):
        pass
