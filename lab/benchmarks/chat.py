"""--mode=chat: conversations whose past is kept between turns, in stores of several sizes, and the time that this saves.

Three tables. A workload of dialogues that come and go (`lab.benchmarks.dialogues`, no model: K and
V are random numbers), for each page size, with local parts pruned and not: the store first has room
for all, then for `shares` percent of the bytes that it came to hold. One dialogue of 180 messages
up to the longest of `contexts`: its bytes, everything included, against vanilla GPT-2 in bfloat16.
And with the model: the time to the first token of a message of `message` tokens behind each of
`contexts`, with the store and without, in turns.
"""
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from config.errors import UserError, at_least
from engine.engine import Engine
from engine.params import SamplingParams
from lab.benchmarks import clock
from lab.benchmarks.dialogues import Served, Workload, simulate
from lab.benchmarks.report import show
from lab.benchmarks.setting import MIN_REPEATS, build, check_length, facts, model_config, numbers, random_tokens

MESSAGES = 180  # earlier ones of a dialogue, on average (Character.AI, "Optimizing AI Inference", 2024)
ENOUGH = 10 ** 15  # bytes


def run(s, data_root: Path) -> dict:
    """All of it, printed as tables; returns what --json prints."""
    at_least(s, repeats=MIN_REPEATS, requests=1, dialogues=1, message=1)
    for name in ('budget', 'nanogpt'):
        if getattr(s, name):
            raise UserError(f"{name}={getattr(s, name)!r}: counts for nothing in mode='chat'")
    contexts, shares, page_sizes = (numbers(name, getattr(s, name)) for name in ('contexts', 'shares', 'page_sizes'))
    if max(contexts) < 2 * max(page_sizes):
        raise UserError(f'contexts={s.contexts!r}: the longest must be at least two pages of page_sizes={s.page_sizes!r}, or '
                        'nothing is kept')
    config = model_config(s, data_root)
    check_length(config, contexts, s.message)
    torch.manual_seed(s.seed)
    model = build(config, s)
    document = facts(s, {'ours': model}) | {'requests': s.requests, 'dialogues': s.dialogues, 'messages': MESSAGES,
                                            'message': s.message, 'longest': max(contexts)}
    document['bytes'] = [one_dialogue(model, max(contexts), page_size, prune, s) for page_size in page_sizes
                         for prune in (True, False)]
    document['workload'] = [cell for page_size in page_sizes for prune in (True, False)
                            for cell in budgets(model, max(contexts), page_size, prune, shares, s)]
    document['cells'] = [measure(model, context, s) for context in contexts]
    show(document)
    return document


def budgets(model, longest, page_size, prune, shares, s) -> list[dict]:
    """The same workload under each budget, the first without limit."""
    def watch(requests):
        return track(requests, title, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    cells, kv_dtype = [], model.resolved_kv_dtype(s.kv_dtype)
    for share in [100, *(share for share in shares if share != 100)]:
        workload = Workload(s.dialogues, MESSAGES, max(2, longest // (MESSAGES + 25)), longest, seed=s.seed)
        title = f'{s.dialogues} dialogues, pages of {page_size}, {share}% of the bytes' + ', pruned' * prune
        cells.append(simulate(model.plan, workload, s.requests, page_size, kv_dtype,
                              cells[0]['held_nbytes'] * share // 100 if cells else ENOUGH, prune, watch))
        cells[-1] |= {'share': share}
    return cells


def one_dialogue(model, longest, page_size, prune, s) -> dict:
    """Bytes of a dialogue that has grown to `longest` tokens in MESSAGES messages and replies, each as long."""
    n = max(1, longest // (2 * (MESSAGES // 2)))
    served, tokens = Served(model.plan, longest, page_size, model.resolved_kv_dtype(s.kv_dtype), ENOUGH, prune), []
    while len(tokens) + 2 * n <= longest:
        message, reply = torch.randint(2 ** 15, (2, n)).tolist()
        served.serve(tokens + message, reply)
        tokens += message + reply
    vanilla = model.plan.vanilla().position_nbytes('bfloat16') * len(model.plan.layers) * len(tokens)
    return {'page_size': page_size, 'prune': prune, 'tokens': len(tokens), 'messages': len(tokens) // n,
            'held_nbytes': served.held_nbytes, 'vanilla_nbytes': vanilla, 'smaller': vanilla / served.held_nbytes}


class FirstToken:
    """Call it for the seconds to the first token of a new message behind the same past."""

    def __init__(self, model, past: list[int], s, prefix_budget: int):
        self.model, self.past, self.n, self.n_cached = model, past, s.message, 0
        self.engine = Engine(model, 1, len(past) + s.message, s.kv_dtype,
                             prefix_budget=prefix_budget, captured=s.captured)

    def __call__(self) -> float:
        message = random_tokens(self.model, 1, self.n)[0].tolist()
        [completion] = self.engine.generate([self.past + message], SamplingParams(max_new_tokens=1, temperature=0))
        self.n_cached = completion.n_cached
        return completion.ttft_s


def measure(model, context: int, s) -> dict:
    """One cell: time to the first token, with the store (which has the past, after the first round) and without."""
    past = random_tokens(model, 1, context)[0].tolist()
    sides = {'ours': FirstToken(model, past, s, ENOUGH), 'without a store': FirstToken(model, past, s, 0)}
    found = clock.alternate(sides, s.repeats, f'time to the first token behind {context:,} tokens')
    times = {name: {'batch': 1, 'ttft_ms': clock.summary(1000 * x for x in seconds)} for name, seconds in found.items()}
    return {'context': context, 'n_cached': sides['ours'].n_cached, 'sides': times,
            'ratios': {'ttft': {'without a store': clock.paired(found['without a store'], found['ours'])}}}
