"""Small traces, and a client of a server that does not exist."""
import json
import threading
import time
import zlib

import numpy as np

from lab.sessions.client import Answer
from lab.sessions.replay import TokenPrompts
from lab.sessions.trace import Request, Session, Trace

IDS = 50, 90
FORKS = dict(turns=7.0, message=7, reply=5, systems=(9, 4), longest=90)


def trace_of(*sessions, systems=()) -> Trace:
    """A trace of sessions, which are lists of requests. They use system prompt 0, if any."""
    return Trace('x', 1, list(systems), [Session(k, 0 if systems else -1, requests)
                                         for k, requests in enumerate(sessions)])


def line(n, at=0.0, every=0.0, message=3, reply=2):
    """Requests that follow each other."""
    return [Request(at + i * every, i - 1, message, reply) for i in range(n)]


class Fake:
    """A client of a server whose replies depend on the prompt alone.

    asked: (path, document) of each request. most: so many at once.
    cached: prompt -> tokens of it that the server says it had; None: it does not say.
    gate(number of the request): called in the middle of each, may wait or raise."""

    def __init__(self, cached=None, gate=lambda number: None, seconds=0.0):
        self.cached, self.gate, self.seconds = cached, gate, seconds
        self.asked, self.most, self._now, self._lock = [], 0, 0, threading.Lock()

    def model(self):
        return 'fake'

    def ask(self, path, document, most_parts=0, answer=None):
        answer = answer or Answer(time.perf_counter())
        with self._lock:
            number = len(self.asked)
            self.asked.append((path, json.loads(json.dumps(document))))
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            self.gate(number)
            time.sleep(self.seconds)
            self.say(answer, document)
        finally:
            with self._lock:
                self._now -= 1
        return answer

    def say(self, answer, document):
        if 'prompt' in document:
            answer.tokens = reply_to(document['prompt'], document['max_tokens'])
            n_prompt = len(document['prompt'])
        else:
            numbers = reply_to(str(document['messages']).encode(), document['max_tokens'])
            answer.text = ' '.join(f'w{number}' for number in numbers)
            n_prompt = sum(len(m['content'].split()) + 4 for m in document['messages'])
        answer.stamps = [time.perf_counter()] * document['max_tokens']
        answer.usage = {'prompt_tokens': n_prompt, 'completion_tokens': document['max_tokens']}
        if self.cached:
            answer.usage['prompt_tokens_details'] = {'cached_tokens': self.cached(document)}


def reply_to(prompt, n) -> list[int]:
    """Ids that no prompt has by itself."""
    rng = np.random.default_rng(zlib.crc32(bytes(prompt)))
    return rng.integers(100, 200, size=n).tolist()


def one_by_one(trace):
    """(session, number of the request, prompt, reply) of each request, one user after the other."""
    low, high = IDS
    ids = lambda numbers: [low + number % (high - low) for number in numbers.tolist()]
    found = []
    for session in sorted(trace.sessions, key=lambda session: session.requests[0].at):
        whole = {-1: ids(trace.system(session))}  # with the reply
        for i, request in enumerate(session.requests):
            prompt = whole[request.after] + ids(trace.message(session, i))
            reply = reply_to(prompt, request.reply)
            whole[i] = prompt + reply
            found.append((session, i, prompt, reply))
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


def ids_of(trace, **fields):
    return TokenPrompts(trace, IDS, fields)
