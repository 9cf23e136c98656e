"""A client of servers with OpenAI's interface: streams a reply and notes when its tokens come."""
import http.client
import json
import time
from contextlib import closing
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from config.errors import UserError

BUSY = 429, 503  # asked again after `Retry-After` seconds
RETRY_S = 1.0    # if the server does not say when


class Failed(UserError):
    """The server gave no complete reply."""


@dataclass
class Answer:
    """A reply. tokens: its ids, if the server says them. stamps: `perf_counter` times at which its
    parts came. usage: OpenAI's document, {} if there is none. refused: how often it was busy."""
    started: float
    tokens: list[int] = field(default_factory=list)
    text: str = ''
    stamps: list[float] = field(default_factory=list)
    usage: dict = field(default_factory=dict)
    refused: int = 0


class Client:
    """Connections to the server at `url`, one for each request; `/v1` may be left out.

    name: of the model; '' = the first that the server names.
    Raises:
        UserError: if `url` is not that of a server.
    """

    def __init__(self, url: str, key: str = '', timeout: float = 600.0, name: str = ''):
        kinds = {'http': http.client.HTTPConnection, 'https': http.client.HTTPSConnection}
        try:
            parts = urlsplit(url if '//' in url else f'http://{url}')
            kind, host, port = kinds[parts.scheme], parts.hostname or '', parts.port
        except (KeyError, ValueError):
            host = ''
        if not host:
            raise UserError(f'url={url!r}: must be like http://127.0.0.1:8000/v1')
        self._connect = lambda: kind(host, port, timeout=timeout)
        self.path, self.timeout, self.url = parts.path.rstrip('/') or '/v1', timeout, url
        self.name = name
        self.headers = {'Content-Type': 'application/json'}
        if key:
            self.headers['Authorization'] = f'Bearer {key}'

    def model(self) -> str:
        """The model to be asked. Raises Failed if the server does not name it."""
        try:
            with closing(self._connect()) as connection:
                connection.request('GET', f'{self.path}/models', headers=self.headers)
                response = connection.getresponse()
                data = response.read()
        except (OSError, http.client.HTTPException) as e:
            raise Failed(f'{type(e).__name__}: {e}') from e
        try:
            names = [each['id'] for each in json.loads(data)['data']]
            name = self.name or names[0]
        except (ValueError, KeyError, IndexError, TypeError):
            raise Failed(f'no list of models: {_message(response.status, data)}') from None
        if name not in names:
            raise Failed(f'it has no model {name!r}, only {", ".join(names)}')
        return name

    def ask(self, path: str, document: dict, most_parts: int = 0,
            answer: Answer | None = None) -> Answer:
        """POST a document with stream=True, and wait for the end of the reply.

        most_parts: hang up after so many parts of the reply; 0 = never.
        answer: to be filled while the reply comes; None = a new one.
        Raises:
            Failed: for an error of the server, a stream that ends early, or if it all takes longer
                than the timeout.
        """
        answer = answer or Answer(time.perf_counter())
        body = json.dumps(document | {'stream': True, 'stream_options': {'include_usage': True}})
        while True:
            try:
                busy = self._ask(path, body, answer, most_parts)
            except (OSError, http.client.HTTPException) as e:
                raise Failed(f'{type(e).__name__}: {e}') from e
            if busy is None:
                return answer
            wait, message = busy
            if time.perf_counter() + wait > answer.started + self.timeout:
                raise Failed(f'refused {answer.refused} times: {message}')
            time.sleep(wait)

    def _ask(self, path, body, answer, most_parts) -> tuple[float, str] | None:
        """Try once. If the server is busy, returns after how many seconds to try again, and what
        it says."""
        with closing(self._connect()) as connection:
            connection.request('POST', f'{self.path}/{path}', body, self.headers)
            response = connection.getresponse()
            if response.status != 200:
                message = _message(response.status, response.read())
                if response.status not in BUSY:
                    raise Failed(message)
                answer.refused += 1
                return _seconds(response.headers.get('Retry-After')), message
            for line in response:
                data = line.removeprefix(b'data:').strip()
                if data == b'[DONE]' or most_parts and len(answer.stamps) >= most_parts:
                    return None
                if line.startswith(b'data:'):
                    _take(data, answer)
                if time.perf_counter() > answer.started + self.timeout:
                    raise Failed(f'not complete after {self.timeout:g} s')
        raise Failed('the stream ended early')


def _take(data: bytes, answer: Answer) -> None:
    """Add one part of a stream."""
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict) or document.get('error'):
        raise Failed(_message(200, data))
    answer.usage = document.get('usage') or answer.usage
    for choice in document.get('choices') or ():
        # vLLM and nanoKV; llama.cpp
        tokens = choice.get('token_ids') or document.get('__verbose', {}).get('tokens') or []
        delta = choice.get('delta') or {}
        text = choice.get('text') or delta.get('content') or ''
        # thoughts take their time, but are not sent back
        thought = delta.get('reasoning_content') or delta.get('reasoning')
        answer.tokens += tokens
        answer.text += text
        if tokens or text or thought:
            answer.stamps.append(time.perf_counter())


def _message(status: int, data: bytes) -> str:
    """What a server says about an error, in OpenAI's document or otherwise."""
    text = data.decode(errors='replace')
    try:
        text = str(json.loads(data)['error']['message'])
    except (ValueError, KeyError, TypeError):
        pass
    return f'status {status}: {text[:300]}'


def _seconds(value: str | None) -> float:
    try:
        return max(0.0, float(value))
    except (TypeError, ValueError):  # absent, or a date
        return RETRY_S
