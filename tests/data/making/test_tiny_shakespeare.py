"""shakespeare_char and shakespeare: nanoGPT's split and ids, from a download or a file."""

import hashlib
import io
import subprocess
import sys
import urllib.request

import pytest

from common.errors import UserError
from data.datasets import DATA_ROOT
from data.tokenfiles import read_meta
from tests.data.support import ids_of

TEXT = 'First Citizen:\nthe end, the end!\n\n' * 3 + 'Z'


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / 'given.txt'
    path.write_text(TEXT)
    return path


def tokens(folder):
    return {split: ids_of(folder, split).tolist() for split in ('train', 'val')}


def test_characters_as_nanogpt_numbers_them(load_prepare, text_file, tmp_path):
    load_prepare('shakespeare_char').main([f'--input={text_file}', f'--out={tmp_path / "out"}'])
    chars, cut = sorted(set(TEXT)), int(len(TEXT) * 0.9)
    ids = [chars.index(c) for c in TEXT]
    assert tokens(tmp_path / 'out') == {'train': ids[:cut], 'val': ids[cut:]}
    assert read_meta(tmp_path / 'out') == {
        'vocab_size': len(chars), 'itos': dict(enumerate(chars)),
        'stoi': {c: i for i, c in enumerate(chars)}}


def test_bpe_of_each_half(load_prepare, tiny, text_file, tmp_path):
    prepare = load_prepare('shakespeare')
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'meta.pkl').write_bytes(b'of an older data set')
    prepare.main([f'--input={text_file}', f'--out={tmp_path / "out"}'])
    cut = int(len(TEXT) * 0.9)
    assert tokens(tmp_path / 'out') == {'train': tiny.encode_ordinary(TEXT[:cut]),
                                        'val': tiny.encode_ordinary(TEXT[cut:])}
    assert read_meta(tmp_path / 'out') is None


def test_download_is_checked_kept_and_not_repeated(load_prepare, tmp_path, monkeypatch):
    prepare = load_prepare('shakespeare_char')
    content = TEXT.replace('\n', '\r\n').encode()
    asked = []
    monkeypatch.setattr(urllib.request, 'urlopen',
                        lambda url, timeout: asked.append(url) or io.BytesIO(content))
    with pytest.raises(UserError, match='sha256.*--input=FILE'):
        prepare.main([f'--out={tmp_path}'])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(prepare, 'SHA256', hashlib.sha256(content).hexdigest())
    for _ in range(2):
        prepare.main([f'--out={tmp_path}'])
    assert asked == [prepare.URL] * 2 and (tmp_path / 'input.txt').read_bytes() == content
    assert len(tokens(tmp_path)['train']) > 50


@pytest.mark.parametrize('content, out, words', [
    (None, 'out', "given.txt' cannot be read: No such file"), (b'', 'out', '0 characters'),
    (b'too short', 'out', '9 characters'), (b'\xff\xfe' * 20, 'out', 'not UTF-8'),
    *((TEXT.encode(), out, out) for out in (
        'given.txt/sub', '/proc/nanokv', 'x' * 300, 'link', 'folder'))])
def test_bad_input_and_output_leave_all_as_it_was(content, out, words, load_prepare, tmp_path):
    path = tmp_path / 'given.txt'
    if content is not None:
        path.write_bytes(content)
    (tmp_path / 'link').symlink_to('nowhere')
    (tmp_path / 'folder' / 'train.bin').mkdir(parents=True)
    before = sorted(tmp_path.rglob('*'))
    with pytest.raises(UserError, match=words) as caught:
        load_prepare('shakespeare_char').main([f'--input={path}', f'--out={tmp_path / out}'])
    assert '\n' not in str(caught.value) and sorted(tmp_path.rglob('*')) == before
    assert content is None or path.read_bytes() == content


def test_scripts_run_from_anywhere_have_help_and_exit_2(tmp_path):
    script = str(DATA_ROOT / 'fineweb_edu' / 'prepare.py')
    bad, good = (subprocess.run([sys.executable, script, flag], cwd=tmp_path, capture_output=True,
                                text=True, check=False) for flag in ('--nonsense=1', '--help'))
    assert bad.returncode == 2 and bad.stdout == ''
    assert bad.stderr.startswith('error: ') and bad.stderr.count('\n') == 1
    assert good.returncode == 0 and 'python data/fineweb_edu/prepare.py' in good.stdout
    assert list(tmp_path.iterdir()) == []
