"""Finding datasets by name, preparing them, and refusing unknown names."""

import subprocess
import sys
import textwrap

import pytest

from common.errors import UserError
from data.datasets import DATA_ROOT, available_datasets, ensure_dataset


def make(root, name, *, prepared=False, prepare=None):
    folder = root / name
    folder.mkdir()
    if prepared:
        (folder / 'train.bin').write_bytes(b'\0\0')
        (folder / 'val.bin').write_bytes(b'\0\0')
    if prepare is not None:
        (folder / 'prepare.py').write_text(textwrap.dedent(prepare))
    return folder


WRITE = """
    import time
    from pathlib import Path
    import numpy as np
    from tests.helpers.datasets import write_dataset
    here = Path(__file__).parent
    def main(argv):
        assert argv == []
        with open(here / 'runs', 'a') as file:
            file.write('x')
        time.sleep(0.5)
        write_dataset(here, {'train': np.array([1]), 'val': np.array([2])}, None)
"""


def test_unknown_name_lists_and_suggests(tmp_path):
    make(tmp_path, 'shakespeare_works', prepare=WRITE)
    make(tmp_path, 'mine', prepared=True)
    make(tmp_path, 'web', prepare="BY_HAND = 'hours'")
    make(tmp_path, 'no_dataset')
    with pytest.raises(UserError) as caught:
        ensure_dataset('shakespear_work', tmp_path)
    message = str(caught.value)
    assert "did you mean 'shakespeare_works'?" in message and '\n' not in message
    assert 'there are mine, shakespeare_works, web; ' in message


@pytest.mark.parametrize('name', ['', '.', '..', '../data', '/etc', 'a\\b', 'a\0b'])
def test_names_that_are_paths_are_refused(tmp_path, name):
    make(tmp_path, 'a', prepared=True)
    make(tmp_path / 'a', 'b', prepared=True)
    with pytest.raises(UserError, match='dataset name'):
        ensure_dataset(name, tmp_path / 'a')


def test_shards_are_a_prepared_dataset(tmp_path):
    folder = make(tmp_path, 'big', prepare='raise SystemExit("was run")')
    for name in ('train_00000.bin', 'train_00001.bin', 'val.bin'):
        (folder / name).write_bytes(b'ok')
    assert ensure_dataset('big', tmp_path) == folder and available_datasets(tmp_path) == ['big']
    (folder / 'train_00000.bin').unlink()
    with pytest.raises(SystemExit, match='was run'):
        ensure_dataset('big', tmp_path)


@pytest.mark.parametrize('prepare, words', [
    ('def main(argv): pass', 'train.bin'), (WRITE, 'Is a directory')])
def test_one_that_leaves_nothing_or_has_no_lock_is_an_error(tmp_path, prepare, words):
    folder = make(tmp_path, 'lazy', prepare=prepare)
    if prepare is WRITE:
        (folder / '.prepare.lock').mkdir()
    with pytest.raises(UserError, match=f'lazy.*{words}'):
        ensure_dataset('lazy', tmp_path)


def test_by_hand_is_not_run_but_explained(tmp_path):
    make(tmp_path, 'huge', prepare='raise SystemExit("was run")\nBY_HAND = "it is 9 TB"')
    with pytest.raises(UserError, match='it is 9 TB; run: python .*/huge/prepare.py'):
        ensure_dataset('huge', tmp_path)
    make(tmp_path, 'done', prepared=True, prepare="BY_HAND = 'it is 9 TB'")
    assert ensure_dataset('done', tmp_path) == tmp_path / 'done'


def test_two_processes_prepare_once_in_the_folder(tmp_path):
    """The writer in prepare.py takes the lock that its process holds already."""
    folder = make(tmp_path, 'fresh', prepare=WRITE)
    (folder / 'val.bin').write_bytes(b'old')
    program = ('import pathlib; from data.datasets import ensure_dataset; '
               f'ensure_dataset("fresh", pathlib.Path({str(tmp_path)!r}))')
    processes = [subprocess.Popen([sys.executable, '-c', program], cwd=DATA_ROOT.parent,
                                  stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = sorted(process.communicate(timeout=60)[0] for process in processes)
    assert outputs == ['preparing dataset fresh...\ntrain has 1 tokens\nval has 1 tokens\n',
                       'waiting for another process that prepares dataset fresh...\n']
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    del files['prepare.py']
    assert files == {'runs': b'x', 'train.bin': b'\1\0', 'val.bin': b'\2\0'}
    assert ensure_dataset('fresh', tmp_path) == folder
