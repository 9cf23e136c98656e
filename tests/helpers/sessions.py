"""Small traces, and a client of a server that does not exist."""
import json
import threading
import time
import zlib

import numpy as np

from lab.sessions.replay import Replay
from lab.sessions.trace import Request, Trace

IDS = 50, 90


def trace_of(*sessions, system=0) -> Trace:
    """A trace of sessions, which are lists of requests."""
    return Trace('x', 1, system, list(sessions))


def written(trace: Trace, path):
    """The trace as a file."""
    lines = [{'format': 'nanokv sessions 1', 'name': trace.name, 'seed': trace.seed,
              'systems': [trace.system_length]}]
    lines += [{'requests': [vars(request) for request in session]} for session in trace.sessions]
    path.write_text('\n'.join(map(json.dumps, lines)))
    return path


def line(n, at=0.0, every=0.0, message=3, reply=2):
    """Requests that follow each other."""
    return [Request(at + i * every, i - 1, message, reply) for i in range(n)]


def forking(at=0.0):
    """Each kind of request."""
    return [Request(at, -1, 7, 5), Request(at + 1, 0, 6, 4),
            Request(at + 2, 0, 8, 3, 'edit', like=1, keep=3),
            Request(at + 3, -1, 7, 5, 'regenerate', like=0, keep=7),
            Request(at + 4, 1, 5, 4, 'fork'), Request(at + 5, 4, 4, 3)]


def replay_of(trace, client, users=0, rate=1.0, **fields) -> Replay:
    return Replay(trace, client, IDS, fields, users, rate)


class Fake:
    """A client of a server whose replies depend on the prompt alone.

    asked: the document of each request. most: so many at once.
    cached: prompt -> tokens of it that the server says it had; None: it does not say.
    gate(number of the request): called in the middle of each, may wait or raise."""

    def __init__(self, cached=None, gate=lambda number: None, seconds=0.0):
        self.cached, self.gate, self.seconds = cached, gate, seconds
        self.asked, self.most, self._now, self._lock = [], 0, 0, threading.Lock()

    def ask(self, document, answer):
        with self._lock:
            number = len(self.asked)
            self.asked.append(json.loads(json.dumps(document)))
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            self.gate(number)
            time.sleep(self.seconds)
            self.say(answer, document)
        finally:
            with self._lock:
                self._now -= 1

    def say(self, answer, document):
        answer.tokens = reply_to(document['prompt'], document['max_tokens'])
        answer.stamps = [time.perf_counter()] * document['max_tokens']
        if self.cached:
            answer.usage = {'prompt_tokens_details': {'cached_tokens': self.cached(document)}}


def reply_to(prompt, n) -> list[int]:
    """Ids that no prompt has by itself."""
    rng = np.random.default_rng(zlib.crc32(bytes(prompt)))
    return rng.integers(100, 200, size=n).tolist()


def one_by_one(trace):
    """(prompt, reply) of each request, one user after the other."""
    low, high = IDS
    ids = lambda numbers: [low + number % (high - low) for number in numbers.tolist()]
    found = []
    for k in sorted(range(len(trace.sessions)), key=lambda k: trace.sessions[k][0].at):
        whole = {-1: ids(trace.system())}  # with the reply
        for i, request in enumerate(trace.sessions[k]):
            prompt = whole[request.after] + ids(trace.message(k, i))
            reply = reply_to(prompt, request.reply)
            whole[i] = prompt + reply
            found.append((prompt, reply))
    return found


def new_tokens(pairs) -> list[int]:
    """Of each (prompt, reply): the tokens after the longest prefix that one before it has, its last
    one never among these; the last token of a reply has no K and V."""
    found, before = [], []
    for prompt, reply in pairs:
        longest = max((common(prompt, other) for other in before), default=0)
        found.append(len(prompt) - min(longest, len(prompt) - 1))
        before.append(prompt + reply[:-1])
    return found


def common(a, b) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
