"""Downloads: a file is correct or absent. urlopen is replaced; there is no network."""
import hashlib
import http.client
import subprocess
import urllib.request
from unittest.mock import MagicMock

import pytest

from common.errors import UserError
from data import download
from data.download import fetch

URL = 'https://example.org/folder/input.txt'
CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
OTHER = hashlib.sha256(CONTENT + b'x').hexdigest()


@pytest.fixture
def urlopen(monkeypatch):
    """What it reads is CONTENT; `read` can be told otherwise."""
    fake = MagicMock()
    monkeypatch.setattr(urllib.request, 'urlopen', fake)
    fake.read = fake.return_value.__enter__.return_value.read
    fake.read.return_value = CONTENT
    return fake


def test_download_with_a_timeout(urlopen, tmp_path, capsys):
    path = tmp_path / 'new' / 'input.txt'
    fetch(URL, path, SHA256)
    assert path.read_bytes() == CONTENT and list(path.parent.iterdir()) == [path]
    urlopen.assert_called_once_with(URL, timeout=download.TIMEOUT)
    assert download.TIMEOUT <= 60 and capsys.readouterr() == ('', '')
    with pytest.raises(UserError, match='cannot fetch'):
        fetch(URL, path / 'no folder', SHA256)


@pytest.mark.parametrize('answer, words', [
    (CONTENT + b'x', f'sha256 {OTHER}; allowed is {SHA256}'),
    (TimeoutError('timed out'), 'timed out'),
    (http.client.IncompleteRead(CONTENT[:9], 990), '9 bytes read, 990')])
def test_failures_are_one_line_and_leave_what_was_there(urlopen, tmp_path, answer, words):
    urlopen.read.side_effect = [answer]
    (tmp_path / 'input.txt').write_text('older')
    with pytest.raises(UserError) as caught:
        fetch(URL, tmp_path / 'input.txt', SHA256, hint='give --input=FILE')
    message = str(caught.value)
    assert URL in message and words in message and '\n' not in message
    assert message.endswith('; give --input=FILE')
    assert [path.name for path in tmp_path.iterdir()] == ['input.txt']
    assert (tmp_path / 'input.txt').read_text() == 'older'


def test_pip_that_takes_too_long(monkeypatch):
    slow = MagicMock(side_effect=subprocess.TimeoutExpired('pip', 600))
    monkeypatch.setattr(subprocess, 'run', slow)
    with pytest.raises(UserError, match='thing==1: no answer in 600 s; advice'):
        download.fetch_sdist('thing==1', SHA256, 'advice')
    assert slow.call_args.kwargs['timeout'] == download.PIP_TIMEOUT
