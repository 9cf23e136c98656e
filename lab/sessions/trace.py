"""Traces of conversations: who sends how much when, and to which earlier turn it belongs.

JSON lines. The first describes the trace, each other one is a session (of one user):

    {"format": "nanokv sessions 1", "name": "chat", "seed": 1, "systems": [350]}
    {"session": 0, "requests": [
        {"at": 4.2, "after": -1, "message": 57, "reply": 120, "kind": "turn"},
        {"at": 61.0, "after": 0, "message": 18, "reply": 95, "kind": "turn"},
        {"at": 70.3, "after": 0, "message": 21, "reply": 90, "kind": "edit", "like": 1, "keep": 9}]}

`at`: seconds from the beginning of the trace. `after`: number of the request of this session whose
reply it follows, -1 = only the system prompt. `message`, `reply`: tokens. The first `keep` tokens
of a message are those of request `like`. `systems`: tokens of the system prompt that all sessions
share. Texts are drawn from the seed, so a trace is small.
"""
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import UserError

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
class Trace:
    """sessions: the requests of each user, in order; each follows an earlier one. system_length:
    tokens of the system prompt. Texts are arrays of numbers below 2**31."""
    name: str
    seed: int
    system_length: int
    sessions: list[list[Request]]

    @classmethod
    def read(cls, path) -> 'Trace':
        """Raises UserError if the file is no trace."""
        try:
            head, *lines = map(json.loads, Path(path).read_text(encoding='utf-8').splitlines())
            if head['format'] != FORMAT:
                raise ValueError('its format is another')
            [system_length] = head['systems']
            return cls(head['name'], head['seed'], system_length, [
                [Request(**given) for given in line['requests']] for line in lines])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise UserError(f'{path} is not a trace of the format {FORMAT!r}: {e!r}') from e

    def system(self) -> np.ndarray:
        return self._draw(self.system_length, 0, 0)

    def message(self, session: int, i: int) -> np.ndarray:
        request = self.sessions[session][i]
        new = self._draw(request.message - request.keep, 1, session, i)
        if not request.keep:
            return new
        return np.concatenate([self.message(session, request.like)[:request.keep], new])

    def _draw(self, n, *about):
        return np.random.default_rng([self.seed, *about]).integers(2 ** 31, size=n)
