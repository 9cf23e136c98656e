"""Makes traces: users that come, write, edit, fork, regenerate, leave and return.

Lengths and times are log-normal, given by their median and `spread` (sigma of the logarithm).
README.md of this folder has the sources of the numbers.
"""
from dataclasses import asdict, dataclass

import numpy as np

from lab.sessions.trace import Request, Session, Trace


@dataclass
class Preset:
    """What users do. Lengths in tokens, times in seconds."""
    sessions: int = 48
    arrival: float = 4.0      # mean time between two users (Poisson process)
    turns: float = 8.0        # mean requests of a session (geometric)
    systems: tuple = (300,)   # shared system prompts; a session has one, the first most often
    message: int = 60         # median
    reply: int = 120          # median
    spread: float = 0.8
    think: float = 20.0       # median time from the end of a reply to the next message
    away: float = 0.0         # share of pauses in which the user is away,
    absence: float = 120.0    # for this long (mean of an exponential distribution)
    edit: float = 0.0         # shares of requests: an earlier message is changed,
    regenerate: float = 0.0   # the last reply is replaced,
    fork: float = 0.0         # an earlier turn is continued in another way, beside the first one
    back: float = 2.0         # mean turns that edits and forks go back (geometric)
    document: int = 0         # median length of a text that each message repeats, changed somewhere
    speed: float = 40.0       # tokens per second of a reply, from which the next pause begins
    longest: int = 4_096      # a conversation that would be longer starts over


PRESETS = {
    'chat': Preset(away=0.1, edit=0.05, regenerate=0.04, fork=0.02),
    'agent': Preset(sessions=32, turns=14.0, systems=(1_200, 900), message=90, reply=40, think=1.5,
                    spread=1.0, regenerate=0.03, fork=0.05, back=4.0, arrival=6.0),
    'editing': Preset(sessions=32, turns=10.0, systems=(120,), document=900, message=16, reply=60,
                      think=8.0, arrival=6.0),
    'forking': Preset(sessions=32, turns=12.0, fork=0.25, regenerate=0.2, edit=0.15, back=3.0,
                      arrival=6.0),
}


def make(name: str, seed: int = 1, **changes) -> Trace:
    """The trace of a preset, with some of its values changed."""
    preset = Preset(**(asdict(PRESETS[name]) | changes))
    systems = list(preset.systems)
    trace = Trace(name, seed, systems, [], asdict(preset) | {'systems': systems})
    start = 0.0
    for number in range(preset.sessions):
        rng = np.random.default_rng([seed, 3, number])
        start += rng.exponential(preset.arrival)
        trace.sessions.append(_User(preset, rng, number, start).session)
    return trace


class _User:
    """Draws one session."""

    def __init__(self, preset: Preset, rng, number: int, start: float):
        self.preset, self.rng, self.now = preset, rng, start
        # weights 1, 1/2, 1/3, ...
        weights = 1 / np.arange(1, len(preset.systems) + 1)
        system = int(rng.choice(len(weights), p=weights / weights.sum())) if len(weights) else -1
        self.session = Session(number, system, [])
        self.ends = [-1]          # last request of each branch
        self.kind = 'turn'        # of the next request, unless it is another
        for _ in range(rng.geometric(1 / preset.turns)):
            self._request()

    def _request(self):
        p, requests = self.preset, self.session.requests
        branch = int(self.rng.integers(len(self.ends)))
        end = self.ends[branch]
        kind, request = self._draw(end)
        if self._length(request) > p.longest:
            kind, request = 'turn', Request(0, -1, self._tokens(p.document or p.message),
                                            self._tokens(p.reply))
            request.reply = min(request.reply, p.longest // 4)
            request.message = min(request.message, p.longest // 2)
        request.at, request.kind = self.now, kind
        requests.append(request)
        if kind == 'fork':
            self.ends.append(len(requests) - 1)
        else:
            self.ends[branch] = len(requests) - 1
        self.now += request.reply / p.speed + self._time(p.think)
        self.kind = 'turn'
        if self.rng.random() < p.away:
            self.now += self.rng.exponential(p.absence)
            self.kind = 'return'

    def _draw(self, end):
        """(kind, request without a time) after request `end` or an earlier one."""
        p, requests = self.preset, self.session.requests
        message, reply = self._tokens(p.message), self._tokens(p.reply)
        if end >= 0 and p.document:  # the text again, changed from some place on
            old = requests[end].message
            keep = int(self.rng.integers(old))
            return 'edit', Request(0, -1, max(keep + 1, old + message - p.message), reply,
                                   like=end, keep=keep)
        at = self.rng.random()
        path = self.session.lineage(end)
        if end < 0 or at >= p.edit + p.regenerate + p.fork:
            return self.kind, Request(0, end, p.document and self._tokens(p.document) or message,
                                      reply)
        back = min(len(path), int(self.rng.geometric(1 / p.back)))
        old = path[-back]
        if at < p.edit:
            keep = int(self.rng.integers(min(message, requests[old].message)))
            return 'edit', Request(0, requests[old].after, message, reply, like=old, keep=keep)
        if at < p.edit + p.regenerate:
            last = requests[end]
            return 'regenerate', Request(0, last.after, last.message, reply, like=end,
                                         keep=last.message)
        return 'fork', Request(0, old, message, reply)

    def _length(self, request):
        requests = self.session.requests
        before = self.session.lineage(request.after)
        system = self.preset.systems[self.session.system] if self.session.system >= 0 else 0
        return system + request.message + request.reply + sum(
            requests[i].message + requests[i].reply for i in before)

    def _tokens(self, median):
        return max(1, round(self.rng.lognormal(np.log(median), self.preset.spread)))

    def _time(self, median):
        return float(self.rng.lognormal(np.log(median), self.preset.spread))
