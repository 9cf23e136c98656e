"""What a long prompt does to the streams of others, and to a short prompt that comes after it."""
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from config.errors import UserError
from lab.benchmarks.clock import progress
from lab.sessions.client import Answer, Client
from lab.sessions.replay import percentiles

LONG, REPEATS = 8_192, 5    # tokens of the long prompt
STREAMS, TOKENS = 4, 3_000  # that run, and the length of their replies
PROMPT = 64                 # tokens of theirs and of the short prompt
BEFORE_S = 3.0              # of undisturbed streams


def measure(client: Client, fields: dict, ids: tuple[int, int], long: int = LONG,
            repeats: int = REPEATS) -> dict:
    """Repeat: start streams; send a prompt of `long` tokens, and after a tenth of a second a short
    one. Returns, in seconds, the gaps in the streams before and until the first token of the long
    prompt, the mean gaps of each stream (its time per token), and the times to the first token of
    both. UserError: if a request fails."""
    model, rng = client.model(), np.random.default_rng(1)
    before, during, means, firsts = [], [], ([], []), ([], [])
    for _ in progress(range(repeats), 'prompts'):
        *streams, first, short = _answers(client, {'model': model, 'temperature': 0} | fields,
                                          lambda n: rng.integers(*ids, size=n).tolist(), long)
        for answer, times in zip((first, short), firsts):
            times.append(answer.stamps[0] - answer.started)
        sent, end = first.started, first.stamps[0]
        for answer in streams:
            stamps = answer.stamps
            if stamps[-1] < end:
                raise UserError(f'a stream of {TOKENS} tokens ended before the long prompt')
            gaps = [(b, b - a) for a, b in zip(stamps, stamps[1:])]
            # the gap in which the first token comes began before it
            parts = ([gap for b, gap in gaps if sent - BEFORE_S < b < sent],
                     [gap for b, gap in gaps if b >= sent and b - gap <= end])
            for part, every, mean in zip(parts, (before, during), means):
                every += part
                if part:
                    mean.append(sum(part) / len(part))
    return {'model': model, 'long': long, 'streams': STREAMS, 'repeats': repeats,
            'before_s': percentiles(before), 'during_s': percentiles(during),
            'p99_over_median': percentiles(during)['p99'] / percentiles(before)['p50'],
            'tpot_before_s': percentiles(means[0]), 'tpot_during_s': percentiles(means[1]),
            'long_ttft_s': percentiles(firsts[0]), 'short_ttft_s': percentiles(firsts[1])}


def _answers(client, common: dict, prompt, long: int) -> list[Answer]:
    """Those of the streams, of the long prompt and of the short one. prompt(n): n token ids."""
    answers, calls = [], []
    with ThreadPoolExecutor(STREAMS + 2) as pool:
        def ask(length, tokens):
            answers.append(Answer(time.perf_counter()))
            document = common | {'prompt': prompt(length), 'max_tokens': tokens}
            calls.append(pool.submit(client.ask, 'completions', document, answer=answers[-1]))

        for _ in range(STREAMS):
            ask(PROMPT, TOKENS)
        while not all(len(answer.stamps) > 1 for answer in answers):
            for call in calls:
                if call.done():
                    call.result()
            time.sleep(0.01)
        time.sleep(BEFORE_S)
        ask(long, 2)
        time.sleep(0.1)
        ask(PROMPT, 2)
        for call in calls:
            call.result()
    return answers
