"""Writing a checkpoint where it cannot be done: one clear line, the one before still whole, nothing else left behind."""
import contextlib
import errno
import os
import signal
import stat
import tempfile
from pathlib import Path

import pytest
import torch

from config.errors import UserError
from tests.programs.support import VANILLA, Died, die, flags, load, run_train, start_program
from training.checkpoint import link_or_copy, load_checkpoint, save_checkpoint

resource = pytest.importorskip('resource')  # not on Windows


@contextlib.contextmanager
def size_limit(n):
    """Files of this process cannot grow beyond n bytes, as on a disk that is full. Not as a fixture: pytest tells of a test
    before its fixtures end, and where that goes into a file, it would be cut off too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_after(monkeypatch, n):
    """The n-th checkpoint from now on (from 1) finds no room."""
    plain, calls = torch.save, []

    def save(checkpoint, f):
        calls.append(1)
        plain(checkpoint, f)
        if len(calls) >= n:
            raise OSError(28, 'No space left on device')
    monkeypatch.setattr(torch, 'save', save)


@pytest.mark.parametrize('room', [0, 1000, 50_000, 400_000])
def test_a_full_disk_is_named_as_such_wherever_it_ends(tmp_path, room):
    """torch's own error would speak of positions in the file."""
    path = tmp_path / 'ckpt.pt'
    save_checkpoint(path, {'a': torch.zeros(10)})
    before = path.read_bytes()
    with size_limit(room), pytest.raises(UserError, match=f'cannot write checkpoint {path}: .*File too large$'):
        save_checkpoint(path, {'a': torch.zeros(100_000), 'b': torch.ones(1000)})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not hasattr(resource, 'prlimit'), reason='sets a limit of another process, which only Linux does')
def test_a_disk_that_fills_up_in_a_long_run_ends_it_with_what_is_kept(tmp_path, data_root):
    settings = VANILLA | dict(out_dir=tmp_path, max_iters=100000, lr_decay_iters=100000, checkpoint_interval=2, eval_iters=1,
                              keep_checkpoints=2)
    process = start_program('train', *flags(settings), data_root=data_root)
    for line in process.stdout:
        if line.startswith('iter 7:'):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (30_000, 30_000))  # room for the metrics
            break
    _, err = process.communicate(timeout=120)
    kept = load(tmp_path / 'ckpt.pt')['iter_num']
    assert (process.returncode, err) == (2, f'error: cannot write checkpoint {tmp_path}/ckpt.pt: [Errno 27] File too large; '
                                            f'that of iteration {kept} is kept, go on with --init_from=resume\n')
    assert kept >= 6
    assert {p.name for p in tmp_path.iterdir()} == {'ckpt.pt', f'ckpt_{kept - 2:07d}.pt', 'metrics.jsonl'}
    assert run_train(tmp_path, init_from='resume', max_iters=kept + 3).rows[-1]['iter'] == kept + 3


def test_a_full_disk_tells_a_run_without_a_checkpoint_that_there_is_none(tmp_path, monkeypatch):
    full_after(monkeypatch, 1)
    with pytest.raises(UserError, match='No space left on device; this run has no earlier one$'):
        run_train(tmp_path, checkpoint_interval=2)
    assert {p.name for p in tmp_path.iterdir()} == {'metrics.jsonl'}


def test_a_full_disk_tells_a_run_that_went_on_from_another_where_to_go_on(tmp_path, monkeypatch):
    run_train(tmp_path, checkpoint_interval=2, keep_checkpoints=3, max_iters=6)
    files = {p.name: p.read_bytes() for p in tmp_path.glob('*.pt')}
    metrics_before = (tmp_path / 'metrics.jsonl').read_bytes()
    full_after(monkeypatch, 1)
    with pytest.raises(UserError, match='ckpt_0000002.pt of iteration 2 is kept, go on with --init_from=resume '
                                        '--resume_from=ckpt_0000002.pt$'):
        run_train(tmp_path, init_from='resume', resume_from='ckpt_0000002.pt', checkpoint_interval=2)
    assert {p.name: p.read_bytes() for p in tmp_path.glob('*')} == files | {
        'metrics.jsonl': (tmp_path / 'metrics.jsonl').read_bytes(), 'metrics_old.jsonl': metrics_before}


def test_a_full_disk_renames_and_deletes_nothing(tmp_path, monkeypatch, val_losses):
    """Neither the best nor the last few have other names before the new one is whole."""
    val_losses[4] = 1.0
    full_after(monkeypatch, 3)
    with pytest.raises(UserError, match='that of iteration 4 is kept'):
        run_train(tmp_path, eval_interval=2, keep_checkpoints=2)
    assert {p.name: load(p)['iter_num'] for p in tmp_path.glob('*.pt')} == {'ckpt.pt': 4, 'ckpt_0000002.pt': 2}
    assert {p.name for p in tmp_path.iterdir()} == {'ckpt.pt', 'ckpt_0000002.pt', 'metrics.jsonl'}


def test_a_folder_that_may_not_be_written_to(monkeypatch):
    with tempfile.TemporaryDirectory() as name:  # not tmp_path: another user could not even enter that
        path = Path(name) / 'ckpt.pt'
        save_checkpoint(path, {'a': 1})
        before = path.read_bytes()
        os.chmod(path, 0o644)
        os.chmod(name, 0o555)
        try:
            if os.geteuid() == 0:  # root may write anywhere
                os.seteuid(65534)
            with pytest.raises(UserError, match=f'cannot write checkpoint {path}: .*Permission denied'):
                save_checkpoint(path, {'a': 2})
        finally:
            if os.getuid() == 0:
                os.seteuid(0)
            os.chmod(name, 0o755)
        assert path.read_bytes() == before and os.listdir(name) == ['ckpt.pt']


def test_an_interrupt_in_the_writing_leaves_the_one_before(tmp_path, monkeypatch):
    run = run_train(tmp_path, max_iters=4)
    before = run.path.read_bytes()

    def interrupted(checkpoint, f):
        f.write(b'half a checkpo')
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.setattr(torch, 'save', interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_train(tmp_path, init_from='resume', max_iters=9)
    assert run.path.read_bytes() == before and {p.name for p in tmp_path.iterdir()} == {'ckpt.pt', 'metrics.jsonl'}


# -- on disk at every moment ------------------------------------------------------------------------------------------

def test_the_file_is_flushed_before_the_rename_and_the_folder_after_it(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, 'fsync', lambda n: (done.append('folder' if stat.S_ISDIR(os.fstat(n).st_mode) else 'file'),
                                                fsync(n)))
    monkeypatch.setattr(os, 'replace', lambda *names: (done.append('rename'), replace(*names)))
    save_checkpoint(tmp_path / 'ckpt.pt', {'a': 1})
    assert done == ['file', 'rename', 'folder']


def test_a_system_that_opens_no_folders_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'open', lambda *args: (_ for _ in ()).throw(PermissionError('a folder')))
    save_checkpoint(tmp_path / 'ckpt.pt', {'a': 1})
    assert torch.load(tmp_path / 'ckpt.pt') == {'a': 1}


@pytest.mark.parametrize('links', [True, False], ids=['hard links', 'no hard links'])
@pytest.mark.parametrize('at', range(8))
def test_killed_at_any_rename_there_is_a_ckpt_to_go_on_from(tmp_path, monkeypatch, val_losses, links, at):
    val_losses[4] = 1.0
    settings = dict(eval_interval=2, keep_checkpoints=2, max_iters=8)
    replace, calls = os.replace, []

    def killed(*names):
        calls.append(1)
        if len(calls) == at + 1:
            die()
        replace(*names)
    with monkeypatch.context() as patch:
        run_train(tmp_path, **settings | dict(max_iters=2))
        if not links:
            patch.setattr(os, 'link', no_links)
        patch.setattr(os, 'replace', killed)
        with pytest.raises(Died):
            run_train(tmp_path, **settings, init_from='resume')
    load_checkpoint(tmp_path / 'ckpt.pt')
    run_train(tmp_path, **settings, init_from='resume')
    assert {p.name: load(p)['iter_num'] for p in tmp_path.glob('*.pt')} == {'ckpt.pt': 8, 'ckpt_0000006.pt': 6,
                                                                           'ckpt_best.pt': 4}


def test_what_a_kill_left_half_written_goes_with_the_next_save(tmp_path):
    for name in ('.ckpt.pt.99.tmp', '.ckpt_best.pt.99.tmp', '.ckpt_0000007.pt.99.tmp'):
        (tmp_path / name).write_bytes(b'half')
    (tmp_path / '.other.pt.99.tmp').write_bytes(b'not ours')
    save_checkpoint(tmp_path / 'ckpt.pt', {'a': 1})
    assert {p.name for p in tmp_path.iterdir()} == {'ckpt.pt', '.other.pt.99.tmp'}


def no_links(*_):
    raise OSError('a file system without hard links')


def test_a_copy_is_whole_and_on_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    (tmp_path / 'a').write_bytes(bytes(range(256)) * 5000)
    (tmp_path / 'b').write_text('the one before')
    fsync, replace, done = os.fsync, os.replace, []

    def synced(number):
        fsync(number)
        status = os.fstat(number)
        done.append('folder' if stat.S_ISDIR(status.st_mode) else (status.st_ino, status.st_size))

    def renamed(old, new):
        done.append(('renamed', os.stat(old).st_ino))
        replace(old, new)
    for name, stand_in in (('link', no_links), ('fsync', synced), ('replace', renamed)):
        monkeypatch.setattr(os, name, stand_in)
    link_or_copy(tmp_path / 'a', tmp_path / 'b')
    copy = (tmp_path / 'b').stat().st_ino
    assert done == [(copy, 256 * 5000), ('renamed', copy), 'folder']
    assert (tmp_path / 'b').read_bytes() == (tmp_path / 'a').read_bytes() and not (tmp_path / 'b').samefile(tmp_path / 'a')
    assert {p.name for p in tmp_path.iterdir()} == {'a', 'b'}


def test_a_copy_that_cannot_be_finished_leaves_the_one_before(tmp_path, monkeypatch):
    def full(number):
        raise OSError(errno.ENOSPC, 'No space left on device')
    (tmp_path / 'a').write_text('new')
    (tmp_path / 'b').write_text('the one before')
    monkeypatch.setattr(os, 'link', no_links)
    monkeypatch.setattr(os, 'fsync', full)
    with pytest.raises(OSError, match='No space left'):
        link_or_copy(tmp_path / 'a', tmp_path / 'b')
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {'a': 'new', 'b': 'the one before'}


def test_a_second_name_for_the_same_file_again_leaves_nothing_behind(tmp_path):
    (tmp_path / 'a').write_text('a')
    for _ in range(2):
        link_or_copy(tmp_path / 'a', tmp_path / 'b')
    assert {p.name for p in tmp_path.iterdir()} == {'a', 'b'} and (tmp_path / 'b').samefile(tmp_path / 'a')
