"""An hour of users, some of whom vanish: is anything lost, does a text change, does memory grow?"""
import contextlib
import random
import sys
import time

from config.errors import UserError
from engine.engine import Engine
from engine.requests.params import SamplingParams
from lab.benchmarks.clock import progress
from lab.benchmarks.serve import same_texts
from lab.sessions import servers
from lab.sessions.client import Answer, Client, Failed
from lab.sessions.presets import PRESETS, make
from lab.sessions.replay import Replay, TokenPrompts

USERS, SESSIONS = 24, 48  # at once, and in each trace
VANISH = 0.1              # share of requests whose client vanishes first, in half of the cases
SOON_S = 0.2              # so soon, in the others during the reply
SETTLED_S = 600.0         # memory is compared with that after so many seconds
SAMPLE = 300              # replies that are compared with those of the model alone


class Vanishing(Client):
    """A client that now and then hangs up and asks again, and keeps all replies."""

    def __init__(self, url: str, name: str = ''):
        super().__init__(url, name=name)
        self.hasty = Client(url, SOON_S)
        self.random, self.num_vanished = random.Random(1), 0
        self.replies: list[tuple[list[int], list[int]]] = []  # (prompt, reply)

    def ask(self, path, document, most_parts=0, answer=None) -> Answer:
        if self.random.random() < VANISH:
            self.num_vanished += 1
            if self.random.random() < 0.5:
                with contextlib.suppress(Failed):
                    self.hasty.ask(path, document)
            else:
                super().ask(path, document, self.random.randint(1, document['max_tokens']))
        found = super().ask(path, document, most_parts, answer)
        if len(found.tokens) != document['max_tokens']:
            raise Failed(f"{len(found.tokens)} of {document['max_tokens']} tokens")
        self.replies.append((document['prompt'], found.tokens))
        return found


def run(client: Vanishing, process, minutes: float, fields, ids) -> dict:
    """Replay traces with rising seeds in closed loops until `minutes` are over."""
    start, memory, errors, seed = time.monotonic(), [], set(), 0
    totals = dict.fromkeys(('requests', 'prompt_tokens', 'computed', 'unavoidable', 'failed'), 0)

    def note():
        seconds = time.monotonic() - start
        if process and (not memory or seconds > memory[-1][0] + 10):
            memory.append((round(seconds), servers.resident(process)))

    while time.monotonic() < start + 60 * minutes:
        trace = make(list(PRESETS)[seed % len(PRESETS)], 1_000 + seed, sessions=SESSIONS)
        print(f'{(time.monotonic() - start) / 60:.0f} minutes: {trace.name}', file=sys.stderr)
        found = Replay(trace, client, TokenPrompts(trace, ids, fields), USERS).run(note)
        errors |= set(found['errors'])
        for key in totals:
            totals[key] += found[key] or 0
        seed += 1
    return {'minutes': (time.monotonic() - start) / 60, 'traces': seed, 'users': USERS} | totals | {
        'errors': sorted(errors)[:5], 'replies': len(client.replies),
        'vanished': client.num_vanished, 'memory': memory, 'growth': growth(memory)}


def growth(memory: list[tuple[float, int]]) -> float | None:
    """By which share memory grew after it had settled. memory: [(seconds, bytes)]; None: too short.
    """
    settled = [nbytes for seconds, nbytes in memory if seconds >= SETTLED_S]
    return max(settled) / settled[0] - 1 if settled else None


def compare(replies, longest: int) -> dict:
    """A sample of replies beside those of the model alone, one request after the other, without a
    prefix cache. UserError: if they differ by more than rounding."""
    model = servers.build(longest)
    engine = Engine(model, 1, longest)
    sample = random.Random(1).sample(replies, min(SAMPLE, len(replies)))
    alone = [engine.generate([prompt], SamplingParams(len(reply), temperature=0))[0].tokens
             for prompt, reply in progress(sample, 'texts')]
    prompts, served = zip(*sample)
    found = same_texts(model, prompts, alone, served, 'the server')
    return {'compared': found['rows'], 'equal': found['rows_equal']}


def check(found: dict) -> None:
    """UserError: if a request failed or memory grew by more than 2%."""
    if found['failed']:
        raise UserError(f"{found['failed']} requests failed: {'; '.join(found['errors'])}")
    if found['growth'] is not None and found['growth'] > 0.02:
        raise UserError(f"memory grew by {100 * found['growth']:.1f}% after ten minutes")
