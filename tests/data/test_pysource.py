"""pysource: hashes, whole packages held out, what is left out. Wheels made here; no network."""

import hashlib
import io
import zipfile

import pytest

from common.errors import UserError
from data.bpe import END_OF_TEXT
from tests.data.support import texts_of

LONG = 'x = 1\n' * 40
WHEELS = {
    'one-1.0': {'one/b.py': f'b = 2\r\n{LONG}', 'one/a.py': LONG, 'one/copy.py': LONG,
                'one/tests/c.py': LONG + '1', 'one/test_d.py': LONG + '2',
                'one/short.py': 'x = 1\n',
                'one/table.py': '"' + 'x' * 100_000 + '"', 'one/notes.txt': LONG + '3',
                'one/_vendor/e.py': LONG + '4', 'one/latin.py': LONG.encode() + b'# \xe9',
                'one-1.0.dist-info/f.py': LONG + '5'},
    'two_words-2.1': {'two/held.py': LONG + '# held\n', 'two/same.py': LONG + '# both\n'},
    'one_more-3': {'more/same.py': LONG + '# both\n', 'more/contest.py': LONG + '# contest\n'},
}


@pytest.fixture
def prepare(load_prepare):
    return load_prepare('pysource')


@pytest.fixture
def wheels(prepare, tmp_path, monkeypatch):
    """A folder of wheels, and a packages.txt that has their hashes."""
    folder, lines = tmp_path / 'wheels', {}
    folder.mkdir()
    for name, files in WHEELS.items():
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, 'w') as archive:
            for path, text in files.items():
                archive.writestr(path, text)
        (folder / f'{name}-py3-none-any.whl').write_bytes(buffer.getvalue())
        digest = hashlib.sha256(buffer.getvalue()).hexdigest()
        package, version = name.rsplit('-', 1)
        lines[name] = f'{package.replace("_", "-")}=={version} --hash=sha256:{digest}  # MIT\n'
    packages = tmp_path / 'packages.txt'
    packages.write_text(lines['one-1.0'] + lines['one_more-3'] + '# held out\n'
                        + lines['two_words-2.1'])
    monkeypatch.setattr(prepare, 'PACKAGES', packages)
    return folder


def test_files_by_path_and_whole_packages_held_out(prepare, wheels, tmp_path, capsys):
    prepare.main([f'--wheels={wheels}', f'--out={tmp_path / "out"}', '--tokenizer=bpe:300'])
    train = [f'# one/a.py\n{LONG}', f'# one/b.py\nb = 2\n{LONG}',
             f'# more/contest.py\n{LONG}# contest\n']
    val = [f'# two/held.py\n{LONG}# held\n', f'# two/same.py\n{LONG}# both\n']
    assert texts_of(tmp_path / 'out') == tuple(
        ''.join(text + END_OF_TEXT for text in texts) for texts in (train, val))
    assert 'train: 3 files' in capsys.readouterr().out


def test_another_file_or_none(prepare, wheels, tmp_path):
    one, two = sorted(wheels.glob('one-*')) + sorted(wheels.glob('two*'))
    one.write_bytes(one.read_bytes() + b' ')
    with pytest.raises(UserError, match='sha256.*one 1.0'):
        prepare.main([f'--wheels={wheels}', f'--out={tmp_path / "out"}'])
    two.unlink()
    with pytest.raises(UserError, match=r'two-words-2.1\*.whl'):
        prepare.main([f'--wheels={wheels}', f'--out={tmp_path / "out"}'])
    assert not (tmp_path / 'out').exists()


def test_pip_gets_every_line_and_runs_nothing(prepare, wheels, tmp_path, monkeypatch):
    def pip_download(requirements, folder, *options, what, hint):
        assert requirements == prepare.PACKAGES.read_text() and '--only-binary=:all:' in options
        for path in wheels.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(prepare, 'pip_download', pip_download)
    prepare.main([f'--out={tmp_path / "out"}', '--tokenizer=bpe:300'])
    assert texts_of(tmp_path / 'out')[1].startswith('# two/held.py\n')
