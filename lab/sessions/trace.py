"""Traces of conversations: who sends how much when, and to which earlier turn it belongs.

JSON lines. The first describes the trace, each other one is a session (of one user):

    {"format": "nanokv sessions 1", "name": "chat", "seed": 1, "systems": [350], "parameters": {..}}
    {"session": 0, "system": 0, "requests": [
        {"at": 4.2, "after": -1, "message": 57, "reply": 120, "kind": "turn"},
        {"at": 61.0, "after": 0, "message": 18, "reply": 95, "kind": "turn"},
        {"at": 70.3, "after": 0, "message": 21, "reply": 90, "kind": "edit", "like": 1, "keep": 9}]}

`at`: seconds from the beginning of the trace. `after`: number of the request of this session whose
reply it follows, -1 = only the system prompt. `message`, `reply`: tokens. The first `keep` tokens
of a message are those of request `like`. `systems`: tokens of the system prompts that sessions
share; `system`: which of them, -1 = none. Texts are drawn from the seed, so a trace is small.
"""
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from config.errors import UserError

FORMAT = 'nanokv sessions 1'


@dataclass
class Request:
    """A message that asks for a reply of a given length; see the module's docstring."""
    at: float
    after: int
    message: int
    reply: int
    kind: str = 'turn'
    like: int = -1
    keep: int = 0


@dataclass
class Session:
    """The requests of one user, in order. `requests[i].after` is below i."""
    number: int
    system: int
    requests: list[Request]

    def lineage(self, i: int) -> list[int]:
        """The requests that request i follows, the first one first, and i itself."""
        path = []
        while i >= 0:
            path.append(i)
            i = self.requests[i].after
        return path[::-1]


@dataclass
class Trace:
    """Sessions, and the tokens of the system prompts that they share."""
    name: str
    seed: int
    systems: list[int]
    sessions: list[Session]
    parameters: dict = field(default_factory=dict)

    @property
    def n_requests(self) -> int:
        return sum(len(session.requests) for session in self.sessions)

    def in_order(self) -> list[tuple[Session, int]]:
        """(session, number of the request) by time of arrival."""
        return sorted(((session, i) for session in self.sessions
                       for i in range(len(session.requests))),
                      key=lambda pair: pair[0].requests[pair[1]].at)

    def length(self, session: Session, i: int) -> int:
        """Tokens of a request, with all that it follows and its reply."""
        system = self.systems[session.system] if session.system >= 0 else 0
        requests = [session.requests[k] for k in session.lineage(i)]
        return system + sum(request.message + request.reply for request in requests)

    @cached_property
    def longest(self) -> int:
        return max(self.length(session, i) for session, i in self.in_order())

    # -- texts, as numbers from 0 to 2**31 - 1 that a client maps to tokens or words ---------------

    def system(self, session: Session) -> np.ndarray:
        if session.system < 0:
            return np.empty(0, dtype=np.int64)
        return self._draw(self.systems[session.system], 0, session.system)

    def message(self, session: Session, i: int) -> np.ndarray:
        request = session.requests[i]
        new = self._draw(request.message - request.keep, 1, session.number, i)
        if not request.keep:
            return new
        return np.concatenate([self.message(session, request.like)[:request.keep], new])

    def reply(self, session: Session, i: int) -> np.ndarray:
        """For simulations: a server writes its own."""
        return self._draw(session.requests[i].reply, 2, session.number, i)

    def _draw(self, n, *about):
        return np.random.default_rng([self.seed, *about]).integers(2 ** 31, size=n)

    # -- files ------------------------------------------------------------------------------------

    def write(self, path) -> None:
        head = {'format': FORMAT, 'name': self.name, 'seed': self.seed, 'systems': self.systems,
                'parameters': self.parameters}
        lines = [head] + [{'session': session.number, 'system': session.system,
                           'requests': [_short(request) for request in session.requests]}
                          for session in self.sessions]
        text = ''.join(json.dumps(line, separators=(',', ':')) + '\n' for line in lines)
        Path(path).write_text(text, encoding='utf-8')

    @classmethod
    def read(cls, path) -> 'Trace':
        """Raises UserError if the file is no trace."""
        try:
            head, *lines = map(json.loads, Path(path).read_text(encoding='utf-8').splitlines())
            if head['format'] != FORMAT:
                raise ValueError('its format is another')
            sessions = [Session(line['session'], line['system'],
                                [Request(**given) for given in line['requests']]) for line in lines]
            return cls(head['name'], head['seed'], head['systems'], sessions,
                       head.get('parameters', {}))
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise UserError(f'{path} is not a trace of the format {FORMAT!r}: {e!r}') from e


def _short(request: Request) -> dict:
    line = asdict(request) | {'at': round(request.at, 3)}
    return line if request.keep else {k: v for k, v in line.items() if k not in ('like', 'keep')}
