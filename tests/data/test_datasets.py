"""Finding datasets by name, preparing them, and refusing names that are none."""

import textwrap

import pytest

from config.errors import UserError
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
    from pathlib import Path
    here = Path(__file__).parent
    def main(argv):
        assert argv == []
        for name in ('val.bin', 'train.bin'):
            (here / name).write_bytes(b'ok')
"""


def test_prepared_dataset_is_not_prepared_again(tmp_path, capsys):
    folder = make(tmp_path, 'done', prepared=True, prepare='raise SystemExit("was run")')
    assert ensure_dataset('done', tmp_path) == folder
    assert capsys.readouterr().out == ''


def test_missing_dataset_prepares_itself_in_its_folder(tmp_path, capsys):
    folder = make(tmp_path, 'fresh', prepare=WRITE)
    assert ensure_dataset('fresh', tmp_path) == folder
    assert (folder / 'train.bin').read_bytes() == b'ok'
    assert capsys.readouterr().out == 'preparing dataset fresh...\n'


def test_half_prepared_dataset_is_prepared(tmp_path):
    folder = make(tmp_path, 'half', prepare=WRITE)
    (folder / 'val.bin').write_bytes(b'old')
    ensure_dataset('half', tmp_path)
    assert (folder / 'val.bin').read_bytes() == b'ok'


def test_errors_of_prepare_come_through(tmp_path):
    make(tmp_path, 'broken', prepare="""
        from config.errors import UserError
        def main(argv):
            raise UserError('no network')
    """)
    with pytest.raises(UserError, match='^no network$'):
        ensure_dataset('broken', tmp_path)


def test_prepare_that_leaves_nothing_is_an_error(tmp_path):
    make(tmp_path, 'lazy', prepare='def main(argv): pass')
    with pytest.raises(UserError, match="'lazy'.*train.bin"):
        ensure_dataset('lazy', tmp_path)


def test_unknown_name_lists_and_suggests(tmp_path):
    make(tmp_path, 'shakespeare_works', prepare=WRITE)
    make(tmp_path, 'mine', prepared=True)
    make(tmp_path, 'no_dataset')
    with pytest.raises(UserError) as caught:
        ensure_dataset('shakespear_work', tmp_path)
    message = str(caught.value)
    assert "did you mean 'shakespeare_works'?" in message and 'available: mine, shakespeare_works' in message
    assert 'no_dataset' not in message and '\n' not in message


@pytest.mark.parametrize('name', ['', '.', '..', '../data', 'a/b', '/etc', 'a\\b', 'a\0b'])
def test_names_that_are_paths_are_refused(tmp_path, name):
    make(tmp_path, 'a', prepared=True)
    make(tmp_path / 'a', 'b', prepared=True)
    with pytest.raises(UserError, match='dataset name'):
        ensure_dataset(name, tmp_path / 'a')


def test_shipped_datasets():
    assert 'shakespeare_works' in available_datasets(DATA_ROOT)
    assert 'recall' not in available_datasets(DATA_ROOT)
