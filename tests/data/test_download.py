"""Downloads: a file is correct or absent. urlopen is replaced; there is no network."""

import hashlib
import http.client
import io
import urllib.error
import urllib.request
from email.message import Message

import pytest

from config.errors import UserError
from data import download
from data.download import fetch

URL = 'https://example.org/folder/input.txt'
CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Response(io.BytesIO):
    def __init__(self, content=CONTENT, length=None, url=URL, fail_after=None):
        super().__init__(content)
        self.headers, self.url, self.fail_after, self.largest = Message(), url, fail_after, 0
        if length is not None:
            self.headers['Content-Length'] = str(length)

    def geturl(self):
        return self.url

    def read(self, n=-1):
        self.largest = max(self.largest, n if n >= 0 else 1 << 60)
        if self.fail_after is not None and self.tell() >= self.fail_after:
            raise self.error
        return super().read(n)

    error = TimeoutError('timed out')


def serve(monkeypatch, response):
    calls = []

    def urlopen(url, timeout=None):
        calls.append((url, timeout))
        if isinstance(response, Exception):
            raise response
        return response

    monkeypatch.setattr(urllib.request, 'urlopen', urlopen)
    return calls


@pytest.mark.parametrize('length', [None, len(CONTENT)])
def test_download_in_pieces_with_a_timeout(monkeypatch, tmp_path, capsys, length):
    response = Response(length=length)
    calls = serve(monkeypatch, response)
    fetch(URL, tmp_path / 'new' / 'input.txt', SHA256)
    assert (tmp_path / 'new' / 'input.txt').read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / 'new').iterdir()] == ['input.txt']
    assert response.largest == download.CHUNK and calls == [(URL, download.TIMEOUT)]
    assert download.TIMEOUT <= 60
    assert capsys.readouterr() == ('', '')  # no progress bar without a terminal


FAILURES = {
    'no network': (urllib.error.URLError(OSError(-2, 'Name or service not known')),
                   'Name or service not known'),
    '404': (urllib.error.HTTPError(URL, 404, 'Not Found', Message(), None), '404: Not Found'),
    'silence': (TimeoutError('timed out'), 'timed out'),
    'stall': (Response(fail_after=1), 'timed out'),
    'protocol': (http.client.BadStatusLine('\n garbage'), 'garbage'),
    'other file': (Response(CONTENT + b'x'),
                   f'sha256 {hashlib.sha256(CONTENT + b"x").hexdigest()}; allowed is {SHA256}'),
    'cut off': (Response(CONTENT[:999], length=len(CONTENT)), '999 of 1,024,000 bytes'),
    'unsafe redirect': (Response(url='http://example.org/input.txt'), 'redirected'),
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


def test_interruption_leaves_nothing(monkeypatch, tmp_path):
    response = Response(fail_after=1)
    response.error = KeyboardInterrupt()
    serve(monkeypatch, response)
    with pytest.raises(KeyboardInterrupt):
        fetch(URL, tmp_path / 'input.txt', SHA256)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('url', ['http://example.org/x', 'file:///etc/passwd', ''])
def test_only_https(tmp_path, url):
    with pytest.raises(UserError, match='https'):
        fetch(url, tmp_path / 'x', SHA256)


def test_a_target_that_cannot_be_written(monkeypatch, tmp_path):
    serve(monkeypatch, Response())
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match='cannot fetch'):
        fetch(URL, tmp_path / 'file' / 'input.txt', SHA256)


def test_pip_that_takes_too_long(monkeypatch):
    def run(command, timeout, **kwargs):
        raise download.subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(download.subprocess, 'run', run)
    with pytest.raises(UserError, match='thing==1: no answer in 600 s; advice'):
        download.fetch_sdist('thing==1', SHA256, 'advice')
