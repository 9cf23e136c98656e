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
    start, weights = 0.0, 1 / np.arange(1, len(systems) + 1)
    for number in range(preset.sessions):
        rng = np.random.default_rng([seed, 3, number])
        start += rng.exponential(preset.arrival)
        system = int(rng.choice(len(systems), p=weights / weights.sum())) if systems else -1
        session = Session(number, system, [])
        _fill(trace, session, preset, rng, start)
        trace.sessions.append(session)
    return trace


def _fill(trace, session, preset, rng, now):
    p, requests = preset, session.requests
    ends, kind = [-1], 'turn'  # the last request of each branch; the next one's, if it continues
    for i in range(rng.geometric(1 / p.turns)):
        branch = int(rng.integers(len(ends)))
        request = _request(session, p, rng, ends[branch], kind)
        requests.append(request)
        if trace.length(session, i) > p.longest:
            message = min(_tokens(p, rng, p.document or p.message), p.longest // 2)
            reply = min(_tokens(p, rng, p.reply), p.longest // 4)
            requests[i] = request = Request(0, -1, message, reply)

        request.at = now
        if request.kind == 'fork':
            ends.append(i)
        else:
            ends[branch] = i
        now += request.reply / p.speed + float(rng.lognormal(np.log(p.think), p.spread))
        away = rng.random() < p.away
        now += rng.exponential(p.absence) if away else 0
        kind = 'return' if away else 'turn'


def _request(session, p, rng, end, kind) -> Request:
    """A request after request `end` or an earlier one. kind: if it simply follows that."""
    requests, path = session.requests, session.lineage(end)
    message, reply = _tokens(p, rng, p.message), _tokens(p, rng, p.reply)
    if end >= 0 and p.document:  # the text again, changed from some place on
        old = requests[end].message
        keep = int(rng.integers(old))
        return Request(0, -1, max(keep + 1, old + message - p.message), reply, 'edit', end, keep)

    at = rng.random()
    if end < 0 or at >= p.edit + p.regenerate + p.fork:
        return Request(0, end, _tokens(p, rng, p.document) if p.document else message, reply, kind)

    old = path[-min(len(path), int(rng.geometric(1 / p.back)))]
    if at < p.edit:
        keep = int(rng.integers(min(message, requests[old].message)))
        return Request(0, requests[old].after, message, reply, 'edit', old, keep)
    if at < p.edit + p.regenerate:
        last = requests[end]
        return Request(0, last.after, last.message, reply, 'regenerate', end, last.message)
    return Request(0, old, message, reply, 'fork')


def _tokens(p, rng, median) -> int:
    return max(1, round(rng.lognormal(np.log(median), p.spread)))
