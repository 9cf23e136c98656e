"""What a long prompt does to the streams of others, and to a short prompt that comes after it."""
import threading
import time

import numpy as np

from config.errors import UserError
from lab.sessions.client import Answer, Client, Failed
from lab.sessions.replay import percentiles

STREAMS, TOKENS = 4, 2_000  # that run, and the length of their replies
PROMPT = 64                 # tokens of theirs and of the short prompt
BEFORE_S = 3.0              # of undisturbed streams


def measure(client: Client, fields: dict, ids: tuple[int, int], long: int, repeats: int,
            show=lambda i: None) -> dict:
    """Repeat: start streams; send a prompt of `long` tokens, and after a tenth of a second a short
    one. Returns, in seconds, the gaps in the streams before and until the first token of the long
    prompt, the mean gaps of each stream (its time per token), and the times to the first token of
    both. UserError: if a request fails."""
    model, rng = client.model(), np.random.default_rng(1)
    before, during, means, firsts = [], [], ([], []), {'long': [], 'short': []}
    for i in range(repeats):
        show(i)
        asked = {}  # name -> (thread, answer, errors)

        def ask(name, length, tokens, asked=asked):
            document = {'model': model, 'prompt': rng.integers(*ids, size=length).tolist(),
                        'max_tokens': tokens, 'temperature': 0} | fields
            call = client, document, Answer(time.perf_counter()), []
            thread = threading.Thread(target=_ask, args=call, daemon=True)
            thread.start()
            asked[name] = thread, *call[2:]

        for k in range(STREAMS):
            ask(k, PROMPT, TOKENS)
        while not all(len(asked[k][1].stamps) > 1 for k in range(STREAMS)):
            _check(asked)
        time.sleep(BEFORE_S)
        ask('long', long, 2)
        time.sleep(0.1)
        ask('short', PROMPT, 2)
        for name in asked:
            asked[name][0].join()
        _check(asked)
        sent = asked['long'][1].started
        for name, found in firsts.items():
            found.append(asked[name][1].stamps[0] - asked[name][1].started)
        end = asked['long'][1].stamps[0]
        for k in range(STREAMS):
            stamps = asked[k][1].stamps
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
            **{f'{name}_ttft_s': percentiles(found) for name, found in firsts.items()}}


def _ask(client, document, answer, errors):
    try:
        client.ask('completions', document, answer=answer)
    except Failed as e:
        errors.append(str(e))


def _check(asked):
    time.sleep(0.01)
    for *_, errors in asked.values():
        if errors:
            raise UserError(f'a request failed: {errors[0]}')
