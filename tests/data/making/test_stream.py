"""Streamed datasets: order of documents, split by hash, shards, the hub and files."""

import hashlib
import sys

import pyarrow.parquet
import pytest

from common.errors import UserError
from data.making.stream import batches, encode_batch, encoded, file_documents, hub_documents
from tests.data.support import DOCUMENTS, contents, fake_datasets, ids_of


def expected(tiny, share=0.1):
    splits = {'train': [], 'val': []}
    for text in DOCUMENTS:
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'big')
        splits['val' if digest / 2**64 < share else 'train'] += tiny.encode_ordinary(text) + [260]
    return splits


def test_max_tokens_is_exact(run, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(batches, '__defaults__', (500,))
    files = run('--max_tokens=5_000', '--shard_tokens=2_000', name='fineweb_edu')
    assert [len(files[f'train_{i:05d}.bin']) for i in range(3)] == [4000, 4000, 2000]
    val = ids_of(tmp_path / 'out', 'val').tolist()
    assert ids_of(tmp_path / 'out', 'train').tolist() == expected(tiny)['train'][:5000]
    assert val == expected(tiny)['val'][:len(val)] and len(val) > 100


def test_threads_keep_the_order_and_read_no_further_than_needed(tiny):
    source = iter([[f'document {i}'] * 3 for i in range(12)])
    results = encoded(source, tiny, 1e-9, workers=2)
    first = next(results)
    assert next(source) == ['document 4'] * 3, 'two batches per thread are read ahead'
    numbers = [tiny.decode(train.tolist())[9:].partition('<')[0] for train, _ in [first, *results]]
    assert numbers == [str(i) for i in range(12) if i != 4]


def test_half_a_surrogate_pair_is_a_replacement_character(tiny, tmp_path):
    """So are documents that differ only in such halves: they are equal, and in one split."""
    lines = [r'{"text": "a \ud83d b"}', r'{"text": "a \udc00 b"}', r'{"text": "\ud83d\ude00"}']
    (tmp_path / 'x.jsonl').write_text('\n'.join(lines * 9))
    documents = list(file_documents([tmp_path / 'x.jsonl']))
    train, val = encode_batch(['', *documents, ''], tiny, 1e-9)  # empty ones give no tokens
    expected = 'a \ufffd b<|endoftext|>' * 2 + '\U0001f600<|endoftext|>'
    assert tiny.decode(train) == expected * 9 and val.size == 0
    splits = [encode_batch(['a %s b' % half], tiny, 0.5)[1].size for half in '\ud83d\udc00\ud800']
    assert len(set(splits)) == 1


@pytest.mark.parametrize('name, content, words', [
    ('x.jsonl', '{"text": "a"}\n{"tex": "b"}\n', 'line 2'),
    ('x.jsonl', '{"text": "a"}\n[1]\n', 'line 2'),
    ('x.jsonl', 'garbage', 'line 1'), ('x.jsonl', '{"text": 5}', 'line 1'),
    ('x.csv', 'a', r'\.jsonl, \.txt and \.parquet'),
    ('x.jsonl', None, 'no file'), ('x.txt', b'\xff\xfe', 'UTF-8'),
    ('x.txt', '', 'none of the documents is for train'),
    ('x.txt', 'one\n', 'none of the documents is for val'),
    *((None, None, option) for option in ('--val=2', '--max_tokens=0', '--workers=x', '--sample=x'))
])
def test_bad_dumps_and_options(run, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    given = dict(source=tmp_path / name) if name else {}
    with pytest.raises(UserError, match=words.partition('=')[0]) as caught:
        run(*([] if name else [words]), **given)
    assert '\n' not in str(caught.value)
    if (tmp_path / 'out').exists():
        assert contents(tmp_path / 'out') == {} and content is not None and name != 'x.csv'


def test_documents_of_files(tmp_path):
    (tmp_path / 'a.txt').write_bytes('\ufeffone\r\n\r\nthrée\u2028x'.encode())
    (tmp_path / 'b.jsonl').write_text('{"text": "four\\nlines"}\n\n{"text": "five"}')
    pyarrow.parquet.write_table(pyarrow.table({'text': ['six'], 'id': [6]}), tmp_path / 'c.parquet')
    documents = ['one', '', 'thrée\u2028x', 'four\nlines', 'five', 'six']
    assert list(file_documents(sorted(tmp_path.iterdir()))) == documents


@pytest.mark.parametrize('name, path, options, sample', [
    ('openwebtext', 'Skylion007/openwebtext', {'revision': 'refs/convert/parquet'}, []),
    ('fineweb_edu', 'HuggingFaceFW/fineweb-edu', {'name': 'CC'}, ['--sample=CC'])])
def test_the_hub_is_streamed(run, monkeypatch, name, path, options, sample):
    def load_dataset(asked, **kwargs):
        assert asked == path and kwargs == {'split': 'train', 'streaming': True, **options}
        return [{'text': None}, *({'text': text} for text in DOCUMENTS)]

    fake_datasets(monkeypatch, load_dataset)
    assert run(*sample, name=name, source=None) == run(), 'the same documents from a file'


@pytest.mark.parametrize('error, words', [
    (ConnectionError("Couldn't reach\nthe Hub"),
     "x/y.*ConnectionError: Couldn't reach the Hub"),
    (KeyError('text'), "the column 'text' of x/y")])
@pytest.mark.parametrize('asked', [False, True])
def test_hub_that_fails_is_one_line(monkeypatch, error, words, asked):
    """Also if it fails when it is asked whether it is there: `load_dataset` would try for long,
    unless the answer is an HTTP error such as a missing file (here, LookupError)."""
    def load_dataset(*args, **kwargs):
        assert not asked or isinstance(error, LookupError)
        raise error

    fake_datasets(monkeypatch, load_dataset, error=error if asked else None)
    with pytest.raises(UserError, match=words) as caught:
        list(hub_documents('x/y'))
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('version', ['none', '3.6.0', 'unknown'])
def test_the_package_datasets_is_needed_in_version_4(monkeypatch, run, tmp_path, version):
    """Versions before 4 run code from repositories on the hub, or prompt on the terminal."""
    fake_datasets(monkeypatch, None, version)
    if version == 'none':
        monkeypatch.setitem(sys.modules, 'datasets', None)
    (tmp_path / 'dump.parquet').write_bytes(b'')
    for source in (None, tmp_path / 'dump.parquet'):
        with pytest.raises(UserError, match=f"{version} is installed: `pip install -U 'data"):
            run(source=source)
    assert not (tmp_path / 'out').exists()
