"""Datasets from local text files: selection, split, separators and refusals."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from data.bpe import END_OF_TEXT
from data.making.textfiles import find_files, pieces, split
from data.tokenfiles import read_meta
from tests.data.support import ids_of, texts_of


@pytest.fixture
def root(tmp_path):
    """The folder that datasets are written to, instead of data/."""
    (tmp_path / 'data').mkdir()
    return tmp_path / 'data'


@pytest.fixture
def run(load_prepare, root, monkeypatch):
    """Return a function that runs prepare.py with given arguments: the texts of the splits."""
    def run(*argv, name='text'):
        prepare = load_prepare('text')
        monkeypatch.setattr(prepare, 'DATA_ROOT', root)
        prepare.main([str(arg) for arg in argv] + ([f'--name={name}'] if name != 'text' else []))
        return texts_of(root / name)
    return run


@pytest.fixture
def files(tmp_path):
    """A folder with 40 texts in subfolders, and files to be ignored."""
    folder = tmp_path / 'files'
    for i in range(40):
        path = folder / f'{"ab"[i % 2]}' / f'{i:02d}.txt'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'text {i} ' + 'x' * 100 + '\n' * (i % 3))
    (folder / 'other.py').write_text('OTHER')
    (folder / 'binary.txt').write_bytes(b'\0\1BINARY')
    (folder / 'b' / 'copy.txt').write_bytes(path.read_bytes().replace(b'\n', b'\r\n'))
    return folder


def test_one_file_is_cut_at_its_tail_and_taken_as_it_is(run, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, '__defaults__', (7, 5))
    text = 'Some text,\nof one file. ' * 10
    (tmp_path / 'book.txt').write_text(text)
    assert run('--input', tmp_path / 'book.txt') == (text[:216], text[216:])
    (tmp_path / 'book.txt').write_bytes(b'\xef\xbb\xbf' + text.replace('\n', '\r\n').encode())
    assert run('--input', tmp_path / 'book.txt', '--val=0.5') == (text[:120], text[120:])


def test_pieces_have_the_ids_of_the_entire_text(tiny):
    @given(st.text(alphabet='the \n\t\x1c\u2003é,\'s'))
    def check(text):
        ids = [i for piece in pieces(text, 3, 1000) for i in tiny.encode_ordinary(piece)]
        assert ids == tiny.encode_ordinary(text)
    check()
    assert [len(piece) for piece in pieces('x' * 30, 3, 7)] == [10, 10, 10]
    assert list(pieces('a bc def gh', 3, 7)) == ['a bc', ' def', ' gh']


def test_whole_files_are_held_out_and_parted(run, files, tmp_path, capsys):
    train, val = run('--input', files, '--glob=*.txt', '--val=0.125', name='mine')
    err = capsys.readouterr().err.splitlines()[0]
    assert err.startswith('skipped 2 of 42 files') and 'zero bytes' in err and 'is equal to' in err
    files.rename(tmp_path / 'elsewhere')
    again = run('--input', tmp_path / 'elsewhere', '--glob=*.txt', '--val=0.125', '--overwrite',
                name='mine')
    assert again == (train, val), 'the split does not depend on the place of the folder'
    parts = [[text.strip() for text in part.split('\n\n\n')[:-1]] for part in (train, val)]
    assert sorted(parts[0] + parts[1]) == sorted(f'text {i} ' + 'x' * 100 for i in range(40))
    assert len(parts[1]) == 5  # a sixth text would exceed an eighth of the characters
    in_order = [part.split()[1] for part in parts[0]]
    assert in_order == sorted(in_order, key=lambda i: (int(i) % 2, int(i))), 'a/ before b/'


def test_tokens_are_learned_from_the_training_split_and_end_of_text_follows_each_file(run, root,
                                                                                     tmp_path):
    words = {'a.txt': 'one two three ' * 50, 'b.txt': 'four five six ' * 50,
             'c.txt': 'zebra ' * 20}
    for name, text in words.items():
        (tmp_path / name).write_text(text)
    paths = [tmp_path / name for name in words]
    train, val = run('--input', *paths, '--tokenizer=bpe:300')
    assert val == words['c.txt'] + END_OF_TEXT
    assert train == words['a.txt'] + END_OF_TEXT + words['b.txt'] + END_OF_TEXT
    meta = read_meta(root / 'text')
    assert ' three' in meta['stoi'] and not any('ze' in token for token in meta['stoi'])
    assert ids_of(root / 'text', 'train').max() == meta['vocab_size'] - 1


@pytest.mark.parametrize('sizes, train, val', [
    ([27, 30_000], [27, 26_997], [3_003]), ([1000, 900, 800], [730, 900, 800], [270]),
    ([160, 900, 800], [900, 800], [160]),  # 160 is more than half of 186
    ([80, 900, 800], [80, 722, 800], [178])])  # less than half of 178
def test_the_tail_of_the_largest_file_where_whole_files_are_too_little(sizes, train, val):
    parts = split([letter * size for letter, size in zip('abc', sizes)], 0.1)
    assert [len(text) for text in parts['train']] == train
    assert [len(text) for text in parts['val']] == val


def test_a_split_of_one_token_is_too_little(run, tmp_path, tiny):
    (tmp_path / 'a.txt').write_text('the word he')
    with pytest.raises(UserError, match='val has a single token.* a larger --val$'):
        run('--input', tmp_path / 'a.txt', '--tokenizer=gpt2')


def test_a_dataset_that_is_there_is_only_replaced_when_asked_to(run, root, tmp_path):
    (tmp_path / 'book.txt').write_text('Some text. ' * 10)
    for name, file in (('mine', 'train.bin'), ('alphabet', 'meta.pkl')):
        (root / name).mkdir()
        (root / name / file).write_bytes(b'mine')
        with pytest.raises(UserError, match=f"'{file}' already.*--overwrite"):
            run('--input', tmp_path / 'book.txt', name=name)
        assert [path.read_bytes() for path in (root / name).iterdir()] == [b'mine']
        assert run('--input', tmp_path / 'book.txt', '--overwrite', name=name)[0][:4] == 'Some'


def test_hidden_files_and_second_links_are_left_out_and_unreadable_folders_told(
        tmp_path, monkeypatch, capsys):
    folder, real = tmp_path / 'files', os.scandir
    (folder / '.git').mkdir(parents=True)
    (folder / 'locked').mkdir()

    def scandir(path):
        if str(path).endswith('locked'):
            raise PermissionError(13, 'Permission denied', str(path))
        return real(path)

    monkeypatch.setattr(os, 'scandir', scandir)
    for name in ('a.txt', '.b.txt', '.git/c.txt'):
        (folder / name).write_text(name)
    (folder / 'z.txt').symlink_to(folder / 'a.txt')
    monkeypatch.chdir(tmp_path)
    for inputs in ([folder], [folder, folder / 'z.txt'], [folder, Path('files/a.txt')]):
        assert [path.name for path in find_files(inputs, '*')] == ['a.txt']
        assert "locked': Permission denied\n" in capsys.readouterr().err
    assert [path.name for path in find_files([folder / '.b.txt'], '*')] == ['.b.txt']


@pytest.mark.parametrize('argv, words', [
    (['--input=missing'], "'missing' does not exist"),
    (['--input=FILES', '--glob=*.zzz'], r"matches --glob='\*.zzz'"),
    (['--input=FILES/binary.txt'], 'none of 1 files is text'),
    (['--input=FILES/tiny.txt'], 'too little text: 10 characters leave 9 for train and 1 for val'),
    (['--input=FILES', '--val=nan'], "--val.*'nan'"),
    (['--input=FILES', '--tokenizer=bert'], 'char, gpt2 and bpe:N'),
    (['--input=FILES', '--tokenizer=bpe:256'], '257 to 65,536'), ([], '--input'),
    (['--input=FILES', '--name=../evil'], "'../evil'"), (['--input=FILES', '--name='], "name ''"),
    (['--input=FILES', '--name=shipped', '--overwrite'], 'program of its own'),
    (['--input=FILES', '--name=link'], 'data/link'),
    (['--input=FILES', f'--name={"x" * 300}'], 'up to 100 letters'),
])
def test_refusals_leave_nothing(run, root, files, argv, words):
    (files / 'tiny.txt').write_text('0123456789')
    (root / 'shipped').mkdir()
    (root / 'shipped' / 'prepare.py').write_text('')
    (root / 'link').symlink_to(root / 'nowhere')
    with pytest.raises(UserError, match=words) as caught:
        run(*[arg.replace('FILES', str(files)) for arg in argv])
    assert '\n' not in str(caught.value)
    assert {path.name for path in root.rglob('*')} == {'link', 'prepare.py', 'shipped'}
