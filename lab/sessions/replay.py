"""Replays a trace against a server: each user is a thread that waits for its replies.

Open loop: requests are sent at the times of the trace, but not before the user has the reply to
the one before. Closed loop: so many users at once, who do not pause. Prompts are token ids, which
continue with the ids of the server's own replies, so that what is unavoidable is known exactly.
"""
import bisect
import queue
import threading
import time

import numpy as np

from common.errors import UserError
from data.progress import tracked
from engine.prefix.blocks import common_tokens
from lab.sessions.client import Answer, Client, Failed
from lab.sessions.trace import Trace


class Known:
    """Sequences of tokens whose K and V have been computed: what a prefix cache of unlimited size
    would have, and so the bound that a server is measured by."""

    def __init__(self):
        self._sequences = []  # as big-endian bytes, in order: neighbours share the longest prefixes

    def unavoidable(self, tokens) -> int:
        """How many tokens of a prompt must be computed: those after the longest prefix that a
        sequence begins with, and at least the last one, whose logits are needed."""
        key = np.asarray(tokens, dtype='>u4').tobytes()
        at = bisect.bisect_left(self._sequences, key)
        prefix = max((common_tokens(key, other)
                      for other in self._sequences[max(0, at - 1):at + 1]), default=0)
        return len(tokens) - min(prefix, len(tokens) - 1)

    def add(self, tokens) -> None:
        bisect.insort(self._sequences, np.asarray(tokens, dtype='>u4').tobytes())


class Replay:
    """A replay, and the answers to its requests. `prompt` and `unavoidable` of an answer are the
    tokens of its prompt, and those of them that no cache could have saved.

    ids: the numbers of a trace are mapped to `range(*ids)`. fields: of the requests' documents.
    users: at once, in a closed loop; 0 = open loop. rate: how much faster than in the trace.
    """

    def __init__(self, trace: Trace, client: Client, ids: tuple[int, int], fields: dict,
                 users: int = 0, rate: float = 1.0):
        self.trace, self.client, self.ids, self.fields = trace, client, ids, fields
        self.users, self.rate, self.answers = users, rate, []
        self.known, self._lock = Known(), threading.Lock()

    def run(self) -> dict:
        """Replay the trace, and return the summary. UserError: if there is no server, or it does
        not say the ids of its replies."""
        sessions = self.trace.sessions
        in_order = sorted(range(len(sessions)), key=lambda k: sessions[k][0].at)
        self._clock = time.perf_counter() - sessions[in_order[0]][0].at / self.rate
        waiting, done = iter(in_order), queue.SimpleQueue()  # of all users; answers or an error

        def user():
            try:
                for session in waiting:
                    self._session(session, done)
            except Exception as e:
                done.put(e)

        for _ in range(min(self.users or len(in_order), len(in_order))):
            # a daemon: an interrupted replay does not wait for replies
            threading.Thread(target=user, daemon=True).start()
        for _ in tracked(range(sum(map(len, sessions))), self.trace.name):
            answer = done.get()
            if isinstance(answer, Exception):
                raise answer
            self.answers.append(answer)
        return self.summary()

    def _session(self, session, done):
        whole = {-1: self._tokens(self.trace.system())}  # each prompt with its reply
        for i, request in enumerate(self.trace.sessions[session]):
            if not self.users:
                due = self._clock + request.at / self.rate
                time.sleep(max(0.0, due - time.perf_counter()))
            answer = Answer(request.reply)
            try:
                if request.after not in whole:
                    raise Failed('it follows a request that failed')
                prompt = whole[request.after] + self._tokens(self.trace.message(session, i))
                self._ask(prompt, answer)
                whole[i] = prompt + answer.tokens
            except Failed as e:
                answer.error = str(e)
            answer.ended = time.perf_counter()
            done.put(answer)

    def _ask(self, prompt: list[int], answer: Answer) -> None:
        answer.prompt = len(prompt)
        with self._lock:
            answer.unavoidable = self.known.unavoidable(prompt)
            self.known.add(prompt)
        self.client.ask({'prompt': prompt, 'max_tokens': answer.asked, 'temperature': 0}
                        | self.fields, answer)
        if not answer.stamps:
            raise Failed('the reply is empty')
        if not answer.tokens:
            raise UserError('the server does not say the ids of its reply: --fields asks it to')
        with self._lock:
            self.known.add(prompt + answer.tokens[:-1])  # the last one was never an input

    def _tokens(self, numbers: np.ndarray) -> list[int]:
        low, high = self.ids
        return (low + numbers % (high - low)).tolist()

    def summary(self) -> dict:
        """Totals and percentiles. Seconds, from the first request to the end of the last one.
        computed: None if the server does not say what was cached."""
        good = [answer for answer in self.answers if not answer.error]
        errors = [answer.error for answer in self.answers if answer.error]
        prompts, asked, unavoidable = (sum(getattr(answer, name) for answer in good)
                                       for name in ('prompt', 'asked', 'unavoidable'))
        details = [answer.usage.get('prompt_tokens_details') or {} for answer in good]
        cached = [each['cached_tokens'] for each in details if 'cached_tokens' in each]
        computed = prompts - sum(cached) if cached else None
        reply = sum(len(answer.tokens) for answer in good)
        seconds = (max(answer.ended for answer in self.answers)
                   - min(answer.started for answer in self.answers))
        return {
            'trace': self.trace.name, 'requests': len(self.answers), 'fields': self.fields,
            'users': self.users, 'rate': self.rate, 'ended': len(good), 'failed': len(errors),
            'errors': list(dict.fromkeys(errors))[:5],
            'refused': sum(answer.refused for answer in self.answers), 'seconds': seconds,
            'reply_tokens': reply, 'asked_tokens': asked, 'tokens_per_second': reply / seconds,
            'prompt_tokens': prompts, 'unavoidable': unavoidable, 'computed': computed,
            'over_unavoidable': computed / unavoidable if cached else None,
            'ttft_s': percentiles(answer.stamps[0] - answer.started for answer in good),
            'tpot_s': percentiles(
                (answer.stamps[-1] - answer.stamps[0]) / (len(answer.tokens) - 1)
                for answer in good if len(answer.tokens) > 1),
            'gap_s': percentiles(b - a for answer in good
                                 for a, b in zip(answer.stamps, answer.stamps[1:]))}


def percentiles(values) -> dict:
    values = list(values)
    return {f'p{q}': float(np.percentile(values, q)) for q in (50, 95, 99, 100) if values}
