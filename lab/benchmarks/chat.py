"""--mode=chat: conversations that reuse a prefix cache of several sizes, and the time this saves.

Three tables. A workload of dialogues that come and go (`lab.benchmarks.dialogues`; no model, K and
V are random numbers) by page size, with local parts pruned or not: first with room for everything,
then for `shares` percent of the bytes that this took. One dialogue of 180 messages, as long as the
longest of `contexts`: its bytes, everything included, against vanilla GPT-2 in bfloat16. And with
the model: the time to the first token of a message of `message` tokens after each of `contexts`,
with the prefix cache and without, interleaved.
"""
from pathlib import Path

import torch

from config.errors import UserError, at_least
from engine.engine import Engine
from engine.params import SamplingParams
from lab.benchmarks import clock
from lab.benchmarks.dialogues import Served, Workload, simulate
from lab.benchmarks.setting import (
    MIN_REPEATS,
    build,
    check_length,
    check_unused,
    facts,
    model_config,
    numbers,
    random_tokens,
)

MESSAGES = 180  # mean number of a dialogue (Character.AI, "Optimizing AI Inference", 2024)
UNLIMITED = 10 ** 15  # bytes


def run(s, data_root: Path) -> dict:
    """The document with all cells."""
    at_least(s, repeats=MIN_REPEATS, requests=1, dialogues=1, message=1)
    check_unused(s, 'budget', 'nanogpt')
    contexts, shares, page_sizes = (numbers(name, getattr(s, name))
                                    for name in ('contexts', 'shares', 'page_sizes'))
    longest = max(contexts)
    if longest < 2 * max(page_sizes):
        raise UserError(f'contexts={s.contexts!r}: the longest must be at least two pages of '
                        f'page_sizes={s.page_sizes!r}, or nothing is cached')
    config = model_config(s, data_root)
    check_length(config, contexts, s.message)
    torch.manual_seed(s.seed)
    model = build(config, s)
    document = facts(s, {'ours': model}) | {
        'requests': s.requests, 'dialogues': s.dialogues, 'messages': MESSAGES,
        'message': s.message, 'longest': longest}
    stores = [(page_size, prune) for page_size in page_sizes for prune in (True, False)]
    document['bytes'] = [one_dialogue(model, longest, *store, s) for store in stores]
    document['workload'] = [cell for store in stores
                            for cell in budgets(model, longest, *store, shares, s)]
    document['cells'] = [measure(model, context, s) for context in contexts]
    return document


def budgets(model, longest, page_size, prune, shares, s) -> list[dict]:
    """The same workload under each budget, the first unlimited."""
    cells, kv_dtype, budget = [], model.resolved_kv_dtype(s.kv_dtype), UNLIMITED
    message_tokens = max(2, longest // (MESSAGES + 25))
    for share in [100, *(share for share in shares if share != 100)]:
        if cells:
            budget = cells[0]['held_nbytes'] * share // 100
        workload = Workload(s.dialogues, MESSAGES, message_tokens, longest, seed=s.seed)
        title = (f'{s.dialogues} dialogues, pages of {page_size}, {share}% of the bytes'
                 + ', pruned' * prune)
        cell = simulate(model.plan, workload, s.requests, page_size, kv_dtype, budget, prune, title)
        cells.append(cell | {'share': share})
    return cells


def one_dialogue(model, longest, page_size, prune, s) -> dict:
    """Bytes of a dialogue of `longest` tokens: MESSAGES messages and replies, equally long."""
    n = max(1, longest // (2 * (MESSAGES // 2)))
    kv_dtype = model.resolved_kv_dtype(s.kv_dtype)
    served, tokens = Served(model.plan, longest, page_size, kv_dtype, UNLIMITED, prune), []
    while len(tokens) + 2 * n <= longest:
        message, reply = torch.randint(2 ** 15, (2, n)).tolist()
        served.serve(tokens + message, reply)
        tokens += message + reply
    per_token = model.plan.vanilla().position_nbytes('bfloat16') * len(model.plan.layers)
    vanilla = per_token * len(tokens)
    return {'page_size': page_size, 'prune': prune, 'tokens': len(tokens),
            'messages': len(tokens) // n, 'held_nbytes': served.held_nbytes,
            'vanilla_nbytes': vanilla, 'smaller': vanilla / served.held_nbytes}


class FirstToken:
    """Call it for the seconds to the first token of a new message after the same past."""

    def __init__(self, model, past: list[int], s, prefix_budget: int):
        self.model, self.past, self.n, self.n_cached = model, past, s.message, 0
        self.engine = Engine(model, 1, len(past) + s.message, s.kv_dtype,
                             prefix_budget=prefix_budget, captured=s.captured)

    def __call__(self) -> float:
        message = random_tokens(self.model, 1, self.n)[0].tolist()
        params = SamplingParams(max_new_tokens=1, temperature=0)
        [completion] = self.engine.generate([self.past + message], params)
        self.n_cached = completion.n_cached
        return completion.ttft_s


def measure(model, context: int, s) -> dict:
    """Time to the first token, with the prefix cache (filled by the warm-up round) and without."""
    past = random_tokens(model, 1, context)[0].tolist()
    sides = {'ours': FirstToken(model, past, s, UNLIMITED),
             'without a store': FirstToken(model, past, s, 0)}
    times = clock.alternate(sides, s.repeats, f'time to the first token after {context:,} tokens')
    found = {name: {'batch': 1, 'ttft_ms': clock.summary(1000 * x for x in seconds)}
             for name, seconds in times.items()}
    return {'context': context, 'n_cached': sides['ours'].n_cached, 'sides': found,
            'ratios': {'ttft': clock.ratios(times)}}
