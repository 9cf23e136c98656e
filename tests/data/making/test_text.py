"""Datasets from local text files: selection, split, separators and refusals."""

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from config.errors import UserError
from data.gpt2_bpe import END_OF_TEXT
from data.making import textfiles
from data.making.textfiles import find_files, scan, split
from data.making.writer import write_dataset
from data.tokenfiles import open_split, read_meta
from tests.data.support import contents, ids_of, texts_of


@pytest.fixture
def root(tmp_path, monkeypatch):
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
    (folder / '.git').mkdir()
    (folder / '.git' / 'config.txt').write_text('HIDDEN')
    (folder / 'other.py').write_text('OTHER')
    (folder / 'binary.txt').write_bytes(b'\0\1BINARY')
    (folder / 'latin.txt').write_bytes('caf\xe9'.encode('latin-1'))
    (folder / 'empty.txt').write_text('')
    return folder


def test_one_file_is_cut_at_its_tail_and_taken_as_it_is(run, tmp_path):
    text = 'Some text,\nof one file. ' * 10
    (tmp_path / 'book.txt').write_text(text)
    assert run('--input', tmp_path / 'book.txt') == (text[:216], text[216:])
    (tmp_path / 'book.txt').write_bytes(b'\xef\xbb\xbf' + text.replace('\n', '\r\n').encode())
    assert run('--input', tmp_path / 'book.txt', '--val=0.5') == (text[:120], text[120:])


@pytest.mark.parametrize('tokenizer', ['char', 'gpt2'])
def test_blocks_of_any_size_give_the_same_dataset(run, root, tmp_path, monkeypatch, tiny,
                                                  tokenizer):
    (tmp_path / 'book.txt').write_text('Some  text,\r\n of thé file. ' * 10)
    found = []
    for size in (textfiles.BLOCK, 1, 5, 64):
        monkeypatch.setattr(textfiles.read_blocks, '__defaults__', (size,))
        run('--input', tmp_path / 'book.txt', f'--tokenizer={tokenizer}')
        found.append(contents(root / 'text'))
    assert found == [found[0]] * 4


def test_whole_files_are_held_out_and_parted(run, files, tmp_path, capsys):
    train, val = run('--input', files, '--glob=*.txt', '--val=0.125', name='mine')
    files.rename(tmp_path / 'elsewhere')
    again = run('--input', tmp_path / 'elsewhere', '--glob=*.txt', '--val=0.125', name='mine')
    assert again == (train, val), 'the split does not depend on the place of the folder'
    parts = [[text.strip() for text in part.split('\n\n\n')[:-1]] for part in (train, val)]
    assert sorted(parts[0] + parts[1]) == sorted(f'text {i} ' + 'x' * 100 for i in range(40))
    assert len(parts[1]) == 5  # a sixth text would exceed an eighth of the characters
    in_order = [part.split()[1] for part in parts[0]]
    assert in_order == sorted(in_order, key=lambda i: (int(i) % 2, int(i))), 'a/ before b/'
    err = capsys.readouterr().err.splitlines()[0]
    assert err.startswith('skipped 3 of 43 files')
    assert all(word in err for word in ('zero bytes', 'not UTF-8', 'it is empty'))


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
    ([27, 30_000], [(0, 27), (0, 26_997)], [(26_997, 30_000)]),
    ([1000, 900, 800], [(0, 730), (0, 900), (0, 800)], [(730, 1000)]),
    ([160, 900, 800], [(0, 900), (0, 800)], [(0, 160)]),  # 160 is more than half of 186
    ([80, 900, 800], [(0, 80), (0, 722), (0, 800)], [(722, 900)])])  # less than half of 178
def test_the_tail_of_the_largest_file_where_whole_files_are_too_little(tmp_path, sizes, train, val):
    for name, size in zip('abc', sizes):
        (tmp_path / name).write_text('x' * size)
    parts = split(scan(find_files([tmp_path], '*'))[0], 0.1)
    found = {name: [(part.start, part.end) for part in parts[name]] for name in parts}
    assert found == {'train': train, 'val': val}


def test_a_split_of_one_token_is_too_little(run, tmp_path, tiny):
    (tmp_path / 'a.txt').write_text('the word he')
    with pytest.raises(UserError, match='val has a single token.* a larger --val$'):
        run('--input', tmp_path / 'a.txt', '--tokenizer=gpt2')


@pytest.mark.parametrize('n_texts, size', [(40, 100), (2, 5000)])
def test_equal_files_are_in_one_split(tmp_path, n_texts, size):
    """Of 40 small texts whole ones are held out; of large ones the tails of all copies."""
    for i in range(n_texts):
        for copy in range(3):
            end = '\r\n' if copy else '\n'  # the same text, with other line ends
            (tmp_path / f'{i}_{copy}').write_bytes((chr(97 + i) * size + end).encode())
    parts = split(scan(find_files([tmp_path], '*'))[0], 0.1)
    spans = {name: {(part.digest, k) for part in parts[name] for k in range(part.start, part.end)}
             for name in parts}
    assert not spans['train'] & spans['val']
    n_train, n_val = (sum(map(len, parts[name])) for name in ('train', 'val'))
    assert n_train + n_val == 3 * n_texts * (size + 1) and 0.08 < n_val / (n_train + n_val) < 0.12


def test_a_dataset_of_other_origin_is_only_replaced_when_asked_to(run, root, tmp_path):
    (tmp_path / 'book.txt').write_text('Some text. ' * 10)
    for name, file in (('mine', 'train.bin'), ('alphabet', 'meta.pkl')):
        (root / name).mkdir()
        (root / name / file).write_bytes(b'mine')
        with pytest.raises(UserError, match=f"'{file}', which this program did not make.*--overw"):
            run('--input', tmp_path / 'book.txt', name=name)
        assert [path.read_bytes() for path in (root / name).iterdir()] == [b'mine']
        (root / name / 'source.json').write_text('{"made_by": "something else"}')
        with pytest.raises(UserError, match='--overwrite'):
            run('--input', tmp_path / 'book.txt', name=name)
    train, _ = run('--input', tmp_path / 'book.txt', '--overwrite', name='mine')
    assert run('--input', tmp_path / 'book.txt', name='mine')[0] == train
    assert json.loads((root / 'mine' / 'source.json').read_text()) == {
        'made_by': 'data/text/prepare.py', 'input': [str(tmp_path / 'book.txt')], 'glob': '*',
        'tokenizer': 'char', 'val': 0.1}
    write_dataset(root / 'mine', {'train': np.array([1]), 'val': np.array([1])}, None)
    assert not (root / 'mine' / 'source.json').exists(), 'another program made it now'


def test_hidden_files_and_second_links_are_left_out_and_unreadable_folders_counted(
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
    (tmp_path / 'link').symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    for inputs in ([folder], [folder, tmp_path / 'link'], [folder, folder / 'z.txt'],
                   [folder, Path('files/a.txt')]):
        assert [path.name for path in find_files(inputs, '*')] == ['a.txt']
        err = capsys.readouterr().err
        assert err.startswith('skipped 1 folders') and 'locked' in err
        assert 'Permission denied' in err and err.count('\n') == err.count('skipped')
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
    (['--input=FILES', '--name=link'], 'is no folder'),
    (['--input=FILES', f'--name={"x" * 300}'], 'up to 100 letters'),
])
def test_refusals_leave_nothing(run, root, files, argv, words):
    (files / 'tiny.txt').write_text('0123456789')
    (root / 'shipped').mkdir()
    (root / 'shipped' / 'prepare.py').write_text('')
    (root / 'file').write_text('')
    (root / 'link').symlink_to(root / 'nowhere')
    with pytest.raises(UserError, match=words) as caught:
        run(*[arg.replace('FILES', str(files)) for arg in argv])
    assert '\n' not in str(caught.value)
    assert {path.name for path in root.rglob('*')} == {'file', 'link', 'prepare.py', 'shipped'}


def test_a_file_that_changes_meanwhile_is_an_error_and_the_older_dataset_stays(run, root, tmp_path,
                                                                               monkeypatch):
    path = tmp_path / 'book.txt'
    path.write_text('old text, ' * 10)
    old = run('--input', path)
    real = textfiles.split

    def split_then_change(*args):
        parts = real(*args)
        path.write_text('old text, ' * 9)
        return parts

    monkeypatch.setattr(textfiles, 'split', split_then_change)
    with pytest.raises(UserError, match='changed while it was read'):
        run('--input', path)
    assert len(ids_of(root / 'text', 'train')) == len(old[0]) == 90
    assert {p.name for p in (root / 'text').iterdir()} == {
        'checksums.json', 'meta.pkl', 'source.json', 'train.bin', 'val.bin'}


def test_memory_does_not_grow_with_the_files(root, tmp_path):
    with open(tmp_path / 'big.txt', 'w') as file:
        file.writelines(f'{i:>99}\n' for i in range(100_000))  # 10 MB
    tracemalloc.start()
    try:
        parts = split(scan(find_files([tmp_path / 'big.txt'], '*'))[0], 0.1)
        textfiles.prepare(root / 'text', parts, 'char', set(' 0123456789\n'), {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 25_000_000  # a block of a million characters briefly needs ids of 4 and 8 bytes
    assert len(open_split(root / 'text', 'train')) == 9_000_000
