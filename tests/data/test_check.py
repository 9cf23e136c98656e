"""Checksums of a data set's files, and the program that compares them."""
import shutil

import numpy as np
import pytest

from common.errors import UserError
from configurator import run_program
from data import check
from data.making.writer import TokenWriter
from data.tokenfiles import open_split, read_meta
from tests.data.support import META
from tests.helpers.datasets import write_dataset


@pytest.fixture
def folder(tmp_path):
    """A data set with two shards of 3 tokens."""
    with TokenWriter(tmp_path, META, 3) as out:
        out.add('train', np.array([0, 1, 2, 2, 1, 0]))
        out.add('val', np.array([1]))
    return tmp_path


def flip(path):
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def run(folder):
    with pytest.raises(SystemExit) as caught:
        run_program(lambda: check.main([str(folder)]))
    return caught.value.code


def test_all_files_are_compared_also_large_ones(folder, capsys, monkeypatch):
    capsys.readouterr()
    check.main([str(folder)])
    names = ['meta.pkl', 'train_00000.bin', 'train_00001.bin', 'val.bin']
    assert capsys.readouterr().out == ''.join(f'{name}: as it was prepared\n' for name in names)
    flip(folder / names[2])
    monkeypatch.setattr(check, 'MAX_BYTES', 11)
    assert len(open_split(folder, 'train')) == 6  # not read, since the split has 12 bytes
    monkeypatch.setattr(check, 'MAX_BYTES', 12)
    with pytest.raises(UserError, match='train_00001.bin. is not the file that was prepared'):
        open_split(folder, 'train')
    assert run(folder) == 2
    out, err = capsys.readouterr()
    assert out.count('as it was prepared') == 2  # before that one
    assert err.startswith(f"error: '{folder / names[2]}' is not the file") and err.count('\n') == 1


@pytest.mark.parametrize('change, words', [
    (lambda folder: (folder / 'train_00001.bin').unlink(), "train_00001.bin' cannot be read"),
    *((lambda folder, text=text: (folder / 'checksums.json').write_text(text),
       "checksums.json' is damaged") for text in (
        '', '[]', '[' * 100_000, '{"a": "b"}', '{"../a": 1}', '{"train.bin": 1.5}')),
    (shutil.rmtree, 'has no files of a data set')])
def test_what_cannot_be_compared_is_named(folder, capsys, change, words):
    change(folder)
    assert run(folder) == 2
    err = capsys.readouterr().err
    assert words in err and err.count('\n') == 1


def test_a_damaged_name_of_a_file_does_not_leave_it_unchecked(folder):
    path = folder / 'checksums.json'
    path.write_text(path.read_text().replace('val.bin', 'ual.bin'))
    with pytest.raises(UserError, match='val.bin. is not the file that was prepared'):
        open_split(folder, 'val')


def test_a_data_set_of_nanogpt_has_nothing_to_compare(folder, capsys):
    (folder / 'checksums.json').unlink()
    flip(folder / 'val.bin')
    capsys.readouterr()
    check.main([str(folder)])
    assert capsys.readouterr().out.count(': it has no checksum\n') == 4
    assert read_meta(folder) == META and len(open_split(folder, 'val')) == 1


def test_the_next_preparation_replaces_the_checksums(folder):
    write_dataset(folder, {'train': np.array([5]), 'val': np.array([6])}, None)
    check.main([str(folder)])
    assert check.read_checksums(folder).keys() == {'train.bin', 'val.bin'}
