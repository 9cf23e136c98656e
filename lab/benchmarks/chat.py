"""--mode=chat: what the prefix cache keeps of a conversation, and the time that it saves.

Measures the bytes of one dialogue of 180 messages by page size against vanilla GPT-2 in bfloat16,
with all positions and compact: with the anchors that stay under memory pressure; and the time to
the first token of the reply to a message of `message` tokens after each of `contexts`, with the
prefix cache and without. Whole sessions of many users: lab/sessions.
"""
from functools import partial
from pathlib import Path

import torch

from config.errors import UserError
from lab.benchmarks import clock, setting
from lab.sessions.simulate import UNLIMITED, Served

MESSAGES = 180  # mean number per dialogue (Character.AI, "Optimizing AI Inference", 2024)


def run(s, data_root: Path) -> dict:
    """The document with all cells."""
    _, config = setting.begin(s, data_root, message=1)
    contexts, page_sizes = (setting.numbers(name, getattr(s, name))
                            for name in ('contexts', 'page_sizes'))
    longest = max(contexts)
    if longest < 2 * max(page_sizes):
        raise UserError(f'contexts={s.contexts!r}: the longest must be at least two pages of '
                        f'page_sizes={s.page_sizes!r}, or nothing is cached')
    model = setting.build(config, s)
    document = setting.facts(s, {'ours': model}) | {'message': s.message}
    document['bytes'] = [row for size in page_sizes
                         for row in one_dialogue(model, longest, size, s)]
    document['cells'] = [measure(model, context, s) for context in contexts]
    return document


def one_dialogue(model, longest, page_size, s) -> list[dict]:
    """Bytes of a dialogue of `longest` tokens, with all positions and compact: MESSAGES messages
    and replies of equal length."""
    n = max(1, longest // MESSAGES)
    kv_dtype = model.resolved_kv_dtype(s.kv_dtype)
    served, tokens = Served(model.plan, longest, page_size, kv_dtype, UNLIMITED), []
    while len(tokens) + 2 * n <= longest:
        message, reply = torch.randint(2 ** 15, (2, n)).tolist()
        served.serve(tokens + message, reply)
        tokens += message + reply
    per_token = model.plan.vanilla().nbytes(1, 1, 'bfloat16')
    vanilla = per_token * len(tokens)
    rows = []
    for compact in (False, True):
        if compact:
            served.store.compact()
        rows.append({'page_size': page_size, 'compact': compact, 'tokens': len(tokens),
                     'messages': len(tokens) // n, 'held_nbytes': served.held_nbytes,
                     'vanilla_nbytes': vanilla, 'smaller': vanilla / served.held_nbytes})
    return rows


def measure(model, context: int, s) -> dict:
    """Time to the first token, with the prefix cache (filled by the warm-up round) and without."""
    past = setting.random_tokens(model, 1, context)[0].tolist()

    def complete(engine):
        message = setting.random_tokens(model, 1, s.message)[0].tolist()
        return setting.greedy(engine, [past + message], [1])[0]

    sides = {name: partial(complete, setting.make_engine(model, 1, context + s.message, s,
                                                         prefix_budget=budget))
             for name, budget in (('ours', UNLIMITED), ('without a store', 0))}
    done = clock.alternate(sides, s.repeats, f'time to the first token after {context:,} tokens')
    times = {name: [completion.ttft_s for completion in each] for name, each in done.items()}
    found = {name: {'batch': 1, 'ttft_ms': clock.summary(1000 * x for x in seconds)}
             for name, seconds in times.items()}
    return {'context': context, 'n_cached': done['ours'][-1].n_cached, 'sides': found,
            'ratios': {'ttft': clock.ratios(times)}}
