"""A client of servers with OpenAI's interface: streams a reply and notes when its tokens come."""
import http.client
import json
import os
import time
from contextlib import closing
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from common.errors import UserError

BUSY = 429, 503  # asked again after RETRY_S seconds
RETRY_S = 1.0
# unlike urllib's, they follow no redirection (a key goes to no other server) and use no proxy
CONNECTIONS = {'http': http.client.HTTPConnection, 'https': http.client.HTTPSConnection}


class Failed(UserError):
    """The server gave no complete reply."""


@dataclass
class Answer:
    """A request for `asked` tokens, and its reply.

    started, ended, stamps: `perf_counter` times of the request, its end, and the parts of the
    reply. tokens: ids of the reply. usage: OpenAI's document, {} if there is none. refused: how
    often the server was busy. prompt, unavoidable: tokens, see `Replay`.
    """
    asked: int
    started: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    stamps: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    usage: dict = field(default_factory=dict)
    refused: int = 0
    error: str = ''
    prompt: int = 0
    unavoidable: int = 0


class Client:
    """Connections to the server at `url`, one for each request; `/v1` may be left out. The key in
    OPENAI_API_KEY is sent, if there is one. timeout: seconds for a whole request. UserError: if
    `url` is no address of a server."""

    def __init__(self, url: str, timeout: float = 600.0):
        self.url, self.address = url, urlsplit(url if '//' in url else f'http://{url}')
        if self.address.scheme not in CONNECTIONS or not self.address.hostname:
            raise UserError(f'url={url!r}: must be like http://127.0.0.1:8000/v1')
        self.path = f"{self.address.path.rstrip('/') or '/v1'}/completions"
        self.timeout, self.headers = timeout, {'Content-Type': 'application/json'}
        if key := os.environ.get('OPENAI_API_KEY'):
            self.headers['Authorization'] = f'Bearer {key}'

    def ask(self, document: dict, answer: Answer) -> None:
        """POST a completion with stream=True, and fill the answer until the end of the reply.
        UserError: if there is no server. Failed: if the server has an error, ends the stream early
        or takes longer than the timeout."""
        document = document | {'stream': True, 'stream_options': {'include_usage': True}}
        try:
            while not self._complete(json.dumps(document), answer):
                answer.refused += 1
                time.sleep(RETRY_S)
        except ConnectionRefusedError as e:
            raise UserError(f'url={self.url!r}: {e}') from e
        except (OSError, http.client.HTTPException) as e:
            raise Failed(f'{type(e).__name__}: {e}') from e

    def _complete(self, body: str, answer: Answer) -> bool:
        """False: the server is busy."""
        connection = CONNECTIONS[self.address.scheme](self.address.netloc, timeout=self.timeout)
        connection.request('POST', self.path, body, self.headers)
        with closing(connection), connection.getresponse() as response:
            if response.status in BUSY:
                self._check_time(answer)
                return False
            if response.status != 200:
                text = response.read()[:300].decode(errors='replace')
                raise Failed(f'status {response.status}: {text}')
            for line in response:
                data = line.removeprefix(b'data:').strip()
                if data == b'[DONE]':
                    return True
                if line.startswith(b'data:'):
                    _take(data, answer)
                self._check_time(answer)
        raise Failed('the stream ended early')

    def _check_time(self, answer: Answer) -> None:
        if time.perf_counter() > answer.started + self.timeout:
            raise Failed(f'not complete after {self.timeout:g} s, refused {answer.refused} times')


def _take(data: bytes, answer: Answer) -> None:
    document = json.loads(data)
    if document.get('error'):
        raise Failed(f"error: {document['error']}")
    answer.usage = document.get('usage') or answer.usage
    for choice in document.get('choices') or ():
        # vLLM and nanoKV; llama.cpp
        tokens = choice.get('token_ids') or document.get('__verbose', {}).get('tokens') or []
        answer.tokens += tokens
        if tokens or choice.get('text'):
            answer.stamps.append(time.perf_counter())
