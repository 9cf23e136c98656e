"""Replays a trace against a server: each user of it is a thread that waits for its replies.

Open loop: requests are sent at the times of the trace, but not before the user has the reply to
the one before. Closed loop: so many users at once, who do not pause.
"""
import queue
import threading
import time

import numpy as np

from config.errors import UserError
from lab.benchmarks import clock
from lab.sessions.client import Answer, Client, Failed
from lab.sessions.known import Known
from lab.sessions.trace import Session, Trace

# a token each with most tokenizers
WORDS = """the of and to in is that for it as was with be by on not he his but at are this have from
or had an they which one you were all her she there would their we him been has when who will no
more if out so up said what its about than into them can only other time new some could these two
may first then do any like my now over such our man me even most made after also did many off
before must well back through years where much your way down should because long each""".split()


class TokenPrompts:
    """Prompts as token ids, which continue with the ids of the server's own replies: exact.

    ids: the numbers of a trace are mapped to `range(*ids)`. fields: of the requests' documents.
    """
    path = 'completions'

    def __init__(self, trace: Trace, ids: tuple[int, int], fields: dict):
        self.trace, self.ids, self.fields = trace, ids, fields

    def document(self, session: Session, i: int, answers: dict[int, Answer]) -> tuple[dict, list]:
        """(document, sequence that stands for the prompt)"""
        path = session.lineage(i)
        prompt = self._tokens(self.trace.system(session))
        for k in path[:-1]:
            prompt += self._tokens(self.trace.message(session, k)) + answers[k].tokens
        prompt += self._tokens(self.trace.message(session, i))
        return {'prompt': prompt} | self.fields, prompt

    def after(self, sequence: list, answer: Answer) -> list:
        """The sequence of a prompt and its reply. The last token of that was never an input.
        Raises UserError if its ids are not known."""
        if not answer.tokens:
            raise UserError('the server does not say the ids of its reply: --fields asks it to, or '
                            'use --prompts=text')
        return sequence + answer.tokens[:-1]

    def _tokens(self, numbers: np.ndarray) -> list[int]:
        low, high = self.ids
        return (low + numbers % (high - low)).tolist()


class TextPrompts:
    """Conversations of words, for servers that do not say token ids. What is unavoidable is then
    estimated: the share of characters that are new, times the tokens of the prompt."""
    path = 'chat/completions'

    def __init__(self, trace: Trace, fields: dict):
        self.trace, self.fields = trace, fields

    def document(self, session, i, answers) -> tuple[dict, list]:
        system, path = self._words(self.trace.system(session)), session.lineage(i)
        messages = [{'role': 'system', 'content': system}] * bool(system)
        for k in path:
            said = self._words(self.trace.message(session, k))
            messages.append({'role': 'user', 'content': said})
            if k != i:
                messages.append({'role': 'assistant', 'content': answers[k].text})
        text = ''.join(f"{each['role']}\n{each['content']}\n" for each in messages) + 'assistant\n'
        return {'messages': messages} | self.fields, [ord(c) for c in text]

    def after(self, sequence, answer) -> list:
        return sequence + [ord(c) for c in answer.text]

    def _words(self, numbers) -> str:
        return ' '.join(WORDS[number % len(WORDS)] for number in numbers)


class Replay:
    """A replay, and the records of its requests.

    users: at once, in a closed loop; 0 = open loop. rate: how much faster than in the trace.
    Raises:
        Failed: if the server does not answer.
    """

    def __init__(self, trace: Trace, client: Client, prompts, users: int = 0, rate: float = 1.0):
        self.trace, self.client, self.prompts = trace, client, prompts
        self.users, self.rate = users, rate
        self.known, self.records = Known(), []
        self._lock = threading.Lock()
        self.model = client.model()

    def run(self, watch=lambda: None) -> dict:
        """Replay the trace, and call `watch` after each request.

        An interruption (Ctrl-C) ends it. Raises UserError if the server does not say the ids that
        the prompts need."""
        in_order = sorted(self.trace.sessions, key=lambda session: session.requests[0].at)
        self._clock, self._first = time.perf_counter(), in_order[0].requests[0].at
        waiting, done = queue.SimpleQueue(), queue.SimpleQueue()  # sessions; records or an error
        for session in in_order:
            waiting.put(session)

        def user():
            try:
                while True:
                    self._session(waiting.get_nowait(), done)
            except queue.Empty:
                pass
            except Exception as e:
                done.put(e)

        for _ in range(min(self.users or len(in_order), len(in_order))):
            # a daemon: an interrupted replay does not wait for replies
            threading.Thread(target=user, daemon=True).start()
        for _ in clock.progress(range(self.trace.n_requests), self.trace.name):
            record = done.get()
            if isinstance(record, Exception):
                raise record
            self.records.append(record)
            watch()
        return self.summary()

    def _session(self, session, done):
        answers = {}
        for i, request in enumerate(session.requests):
            due = self._now() if self.users else (request.at - self._first) / self.rate
            time.sleep(max(0.0, due - self._now()))
            done.put(self._request(session, i, answers))

    def _request(self, session, i, answers) -> dict:
        request = session.requests[i]
        record = {'session': session.number, 'request': i, 'kind': request.kind,
                  'asked': request.reply, 'sent': self._now(), 'error': ''}
        answer = Answer(time.perf_counter())
        try:
            if any(k not in answers for k in session.lineage(i)[:-1]):
                raise Failed('it follows a request that failed')
            document, sequence = self.prompts.document(session, i, answers)
            with self._lock:
                new = self.known.unavoidable(sequence)
                self.known.add(sequence)
            limits = {'model': self.model, 'max_tokens': request.reply, 'temperature': 0}
            self.client.ask(self.prompts.path, limits | document, answer=answer)
            record |= measured(answer, new / len(sequence))
            whole = self.prompts.after(sequence, answer)
            with self._lock:
                self.known.add(whole)
            answers[i] = answer
        except Failed as e:
            record['error'] = str(e)
        return record | {'refused': answer.refused, 'ended': self._now()}

    def _now(self) -> float:
        return round(time.perf_counter() - self._clock, 4)

    def summary(self) -> dict:
        """Totals and percentiles. Seconds, from the first request to the end of the last one.
        None: what a server without `usage` and `cached_tokens` does not tell."""
        records = self.records
        good = [record for record in records if not record['error']]
        errors = [record['error'] for record in records if record['error']]

        def total(key):
            return sum(record[key] or 0 for record in good)

        counted = all(record['prompt'] for record in good)
        told = counted and any(record['cached'] is not None for record in good)
        computed = total('prompt') - total('cached')
        seconds = max(r['ended'] for r in records) - min(r['sent'] for r in records)
        return {
            'trace': self.trace.name, 'seed': self.trace.seed,
            'sessions': len(self.trace.sessions), 'requests': self.trace.n_requests,
            'model': self.model, 'prompts': self.prompts.path, 'fields': self.prompts.fields,
            'users': self.users, 'rate': self.rate, 'ended': len(good), 'failed': len(errors),
            'errors': list(dict.fromkeys(errors))[:5],
            'refused': sum(record['refused'] for record in records),
            'seconds': seconds, 'reply_tokens': total('reply'),
            'asked_tokens': total('asked'),
            'prompt_tokens': total('prompt') if counted else None,
            'unavoidable': total('unavoidable') if counted else None,
            'computed': computed if told else None,
            'over_unavoidable': computed / total('unavoidable') if told else None,
            'tokens_per_second': total('reply') / seconds,
            'ttft_s': percentiles([record['ttft'] for record in good]),
            'tpot_s': percentiles([record['tpot'] for record in good if record['reply'] > 1]),
            'gap_s': percentiles([gap for record in good for gap in record['gaps']])}


def measured(answer: Answer, new: float) -> dict:
    """What a record has of a reply. new: the share of the prompt that had to be computed.

    Seconds: `ttft` to the first token, `tpot` on average from each token to the next, `gaps`
    between the parts of the stream."""
    stamps, usage = answer.stamps, answer.usage
    if not stamps:
        raise Failed('the reply is empty')
    reply = len(answer.tokens) or usage.get('completion_tokens') or len(stamps)
    prompt = usage.get('prompt_tokens') or 0
    cached = (usage.get('prompt_tokens_details') or {}).get('cached_tokens')
    return {'prompt': prompt, 'reply': reply, 'cached': cached,
            'unavoidable': max(1, round(new * prompt)) if prompt else 0,
            'ttft': round(stamps[0] - answer.started, 5),
            'tpot': round((stamps[-1] - stamps[0]) / max(1, reply - 1), 6),
            'gaps': [round(b - a, 5) for a, b in zip(stamps, stamps[1:])]}


def percentiles(values) -> dict:
    if not values:
        return {}
    return {f'p{q}': float(np.percentile(values, q)) for q in (50, 95, 99)} | {
        'max': float(max(values))}
