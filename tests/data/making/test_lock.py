"""The lock on preparing a folder."""

import fcntl
import threading
import time

import numpy as np
import pytest

from config.folder_lock import one_at_a_time
from data.making.writer import write_dataset


def test_the_lock_may_be_taken_again_by_its_thread_but_not_by_another(tmp_path):
    times = []

    def other():
        with one_at_a_time(tmp_path):
            times.append(time.monotonic())

    with one_at_a_time(tmp_path), one_at_a_time(tmp_path / '..' / tmp_path.name):
        write_dataset(tmp_path, {'train': np.array([1]), 'val': np.array([7])}, None)
        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.2)
        assert times == [] and (tmp_path / '.prepare.lock').exists()
    thread.join(10)
    assert len(times) == 1 and not (tmp_path / '.prepare.lock').exists()


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
