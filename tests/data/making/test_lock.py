"""The lock on preparing a folder."""

import fcntl
import threading
import time

import pytest

from config.folder_lock import one_at_a_time


def test_a_lock_whose_file_is_gone_is_no_lock(tmp_path):
    """Of three in a row, the second wakes up with the file that the first one removed."""
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
