"""A client of servers with OpenAI's interface: streams a reply and notes when its tokens come."""
import http.client
import json
import os
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from config.errors import UserError

BUSY = 429, 503  # asked again after RETRY_S seconds
RETRY_S = 1.0
# unlike urllib's, they follow no redirection (a key goes to no other server) and use no proxy
CONNECTIONS = {'http': http.client.HTTPConnection, 'https': http.client.HTTPSConnection}


class Failed(UserError):
    """The server gave no complete reply."""
    busy = False  # it may be asked again


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
    """Connections to the server at `url`, one for each request; `/v1` may be left out. The key in
    OPENAI_API_KEY is sent, if there is one.

    timeout: seconds for a whole request. name: of the model; '' = the first that the server names.
    Raises:
        UserError: if `url` is not that of a server.
    """

    def __init__(self, url: str, timeout: float = 600.0, name: str = ''):
        self.address = urlsplit(url if '//' in url else f'http://{url}')
        if self.address.scheme not in CONNECTIONS or not self.address.hostname:
            raise UserError(f'url={url!r}: must be like http://127.0.0.1:8000/v1')
        self.base = self.address.path.rstrip('/') or '/v1'
        self.timeout, self.name = timeout, name

    def model(self) -> str:
        """The model to be asked. Raises Failed if the server does not name it."""
        with self._open('models') as response:
            data = response.read()
        try:
            names = [each['id'] for each in json.loads(data)['data']]
            name = self.name or names[0]
        except (ValueError, KeyError, IndexError, TypeError):
            raise Failed(f'no list of models: {_message(200, data)}') from None
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
        document = document | {'stream': True, 'stream_options': {'include_usage': True}}
        while True:
            try:
                with self._open(path, document) as response:
                    self._read(response, answer, most_parts)
                return answer
            except Failed as e:
                if not e.busy:
                    raise
                answer.refused += 1
                if time.perf_counter() + RETRY_S > answer.started + self.timeout:
                    raise Failed(f'refused {answer.refused} times: {e}') from e
                time.sleep(RETRY_S)

    @contextmanager
    def _open(self, path: str, document: dict | None = None):
        """Yield the response; a connection that breaks while it is read is Failed, too."""
        headers = {'Content-Type': 'application/json'}
        if key := os.environ.get('OPENAI_API_KEY'):
            headers['Authorization'] = f'Bearer {key}'
        method, body = ('POST', json.dumps(document)) if document is not None else ('GET', None)
        connect = CONNECTIONS[self.address.scheme]
        try:
            connection = connect(self.address.netloc, timeout=self.timeout)
            connection.request(method, f'{self.base}/{path}', body, headers)
            with closing(connection), connection.getresponse() as response:
                if response.status != 200:
                    failed = Failed(_message(response.status, response.read()))
                    failed.busy = response.status in BUSY
                    raise failed
                yield response
        except (OSError, http.client.HTTPException) as e:
            raise Failed(f'{type(e).__name__}: {e}') from e

    def _read(self, response, answer, most_parts) -> None:
        for line in response:
            data = line.removeprefix(b'data:').strip()
            if data == b'[DONE]' or most_parts and len(answer.stamps) >= most_parts:
                return
            if line.startswith(b'data:'):
                _take(data, answer)
            if time.perf_counter() > answer.started + self.timeout:
                raise Failed(f'not complete after {self.timeout:g} s')
        raise Failed('the stream ended early')


def _take(data: bytes, answer: Answer) -> None:
    document = json.loads(data)
    if document.get('error'):
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
    return f"status {status}: {data[:300].decode(errors='replace')}"
