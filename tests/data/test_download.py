"""Downloads: a file is correct or absent. urlopen is replaced; there is no network."""

import hashlib
import http.client
import io
import urllib.error
import urllib.request

import pytest

from config.errors import UserError
from data import download
from data.download import fetch

URL = 'https://example.org/folder/input.txt'
CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Response(io.BytesIO):
    def __init__(self, content=CONTENT, error=None):
        super().__init__(content)
        self.error = error

    def read(self):
        if self.error:
            raise self.error
        return super().read()


def serve(monkeypatch, response):
    calls = []

    def urlopen(url, timeout=None):
        calls.append((url, timeout))
        if isinstance(response, Exception):
            raise response
        return response

    monkeypatch.setattr(urllib.request, 'urlopen', urlopen)
    return calls


def test_download_with_a_timeout(monkeypatch, tmp_path, capsys):
    calls = serve(monkeypatch, Response())
    fetch(URL, tmp_path / 'new' / 'input.txt', SHA256)
    assert (tmp_path / 'new' / 'input.txt').read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / 'new').iterdir()] == ['input.txt']
    assert calls == [(URL, download.TIMEOUT)] and download.TIMEOUT <= 60
    assert capsys.readouterr() == ('', '')
    serve(monkeypatch, Response())
    with pytest.raises(UserError, match='cannot fetch'):
        fetch(URL, tmp_path / 'new' / 'input.txt' / 'no folder', SHA256)


FAILURES = {
    'no network': (urllib.error.URLError(OSError(-2, 'Name or service not known')),
                   'Name or service not known'),
    'stall': (Response(error=TimeoutError('timed out')), 'timed out'),
    'other file': (Response(CONTENT + b'x'),
                   f'sha256 {hashlib.sha256(CONTENT + b"x").hexdigest()}; allowed is {SHA256}'),
    'cut off': (Response(error=http.client.IncompleteRead(CONTENT[:9], 990)), '9 bytes read, 990'),
}


@pytest.mark.parametrize('failure', FAILURES)
def test_failures_are_one_line_and_leave_what_was_there(monkeypatch, tmp_path, failure):
    answer, words = FAILURES[failure]
    if isinstance(answer, Response):
        answer.seek(0)
    serve(monkeypatch, answer)
    (tmp_path / 'input.txt').write_text('older')
    with pytest.raises(UserError) as caught:
        fetch(URL, tmp_path / 'input.txt', SHA256, hint='give --input=FILE')
    message = str(caught.value)
    assert URL in message and words in message and '\n' not in message
    assert message.endswith('; give --input=FILE')
    assert [path.name for path in tmp_path.iterdir()] == ['input.txt']
    assert (tmp_path / 'input.txt').read_text() == 'older'


def test_pip_that_takes_too_long(monkeypatch):
    def run(command, timeout, **kwargs):
        raise download.subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(download.subprocess, 'run', run)
    with pytest.raises(UserError, match='thing==1: no answer in 600 s; advice'):
        download.fetch_sdist('thing==1', SHA256, 'advice')
