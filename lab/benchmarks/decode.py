"""--mode=decode: time per output token (TPOT) out of filled caches, greedy, as a generation loop does it.

A round fills the cache with `held` random tokens, then takes `steps` steps of one token per row; its TPOT is the whole
time over the steps. In every round the memory bandwidth is measured too, next to the sides, and the share of it that is
reached is a median over rounds.

    without budget   held = context, room for context + steps
    with budget      room for exactly context tokens, of which the last `steps` are timed; batch: the most rows that fit
"""
import copy
from pathlib import Path

import torch

from config.errors import UserError, at_least
from config.sizes import parse_bytes
from engine.decode import fast_decode
from lab.benchmarks import clock, generation, peers
from lab.benchmarks.bandwidth import Bandwidth
from lab.benchmarks.capacity import most_sequences
from lab.benchmarks.report import show
from lab.benchmarks.setting import (
    MIN_REPEATS,
    build,
    check_length,
    facts,
    make_cache,
    model_config,
    numbers,
    random_tokens,
    vanilla_config,
)
from lab.benchmarks.traffic import kv_read_per_step, weight_read_bytes


class DecodeRound:
    """Call it for the seconds per token (of all rows together) of one round."""

    def __init__(self, model, batch: int, held: int, max_seq_len: int, steps: int, kv_dtype: str,
                 compiled: bool = False, captured: bool = True):
        self.model, self.held, self.steps = model, held, steps
        self.cache = make_cache(model, batch, max_seq_len, kv_dtype)
        self.decode = fast_decode(model, self.cache, captured, compiled)
        self.first = random_tokens(model, batch, 1)

    @torch.inference_mode()
    def __call__(self) -> float:
        self.cache.fill_(self.held)
        decode = self.decode
        if decode:
            decode.prepare(self.cache.batch_size)
        tokens = self.first                                                   # (B, 1)
        with clock.Stopwatch(self.model.device) as watch:
            for _ in range(self.steps):
                logits = decode(tokens) if decode else self.model(tokens, cache=self.cache)[0][:, -1]
                tokens = logits.argmax(-1, keepdim=True)
        return watch.seconds / self.steps


def run(s, data_root: Path) -> dict:
    """All cells, printed as tables; returns what --json prints."""
    at_least(s, steps=1, repeats=MIN_REPEATS)
    if s.against in generation.ENGINES:
        return generation.run(s, data_root)
    if s.against in peers.PACKAGES:
        return peers.run(s, data_root)
    if s.nanogpt:
        raise UserError(f"nanogpt={s.nanogpt!r} is a checkout to compare with: it needs against='nanogpt'")
    contexts, batches = numbers('contexts', s.contexts), numbers('batch_sizes', s.batch_sizes)
    budget = checked_budget(s, contexts)
    further = 0 if budget else s.steps
    config = model_config(s, data_root)
    check_length(config, contexts, further)
    torch.manual_seed(s.seed)
    models = {'ours': build(config, s)}
    vanilla = vanilla_config(config, max(contexts) + further)
    if s.against == 'vanilla':
        models['vanilla'] = build(vanilla, s)
    elif s.against == 'vanilla_float32':
        plain = copy.copy(s)
        plain.given, plain.dtype, plain.weight_dtype = s.given, 'float32', 'auto'
        models['vanilla float32'] = build(vanilla, plain)
    elif s.against == 'float32_kv':
        models['float32 K/V'] = models['ours']
    kv_dtypes = {name: 'float32' if 'float32' in name else s.kv_dtype for name in models}
    document = facts(s, models) | {'steps': s.steps, 'budget': budget}
    bandwidth, rates, cells = Bandwidth(models['ours'].device), [], []
    for context in contexts:
        cell = {'context': context, 'held': context + further - s.steps, 'max_seq_len': context + further}
        if budget:
            cell['capacity'] = {name: most_sequences(m, budget, context, kv_dtypes[name], s.budget)
                                for name, m in models.items()}
            rows = [{name: c['sequences'] for name, c in cell['capacity'].items()}]
        else:
            rows = [dict.fromkeys(models, batch) for batch in batches]
        cells += [cell | measure(models, kv_dtypes, cell, each, s, bandwidth, rates) for each in rows]
    document |= {'bandwidth': bandwidth.describe(rates), 'cells': cells}
    show(document)
    return document


def checked_budget(s, contexts) -> int:
    """Bytes; 0 = none."""
    if not s.budget:
        return 0
    if 'batch_sizes' in s.given:
        raise UserError(f'batch_sizes={s.batch_sizes!r} and budget={s.budget!r} both say how many sequences: leave one out')
    if min(contexts) <= s.steps:
        raise UserError(f'contexts: {min(contexts)} tokens leave no room for steps={s.steps} and one before them')
    return parse_bytes(s.budget)


def measure(models, kv_dtypes, cell, batches, s, bandwidth, rates) -> dict:
    """Figures of each side and the ratios between them; adds the bandwidths measured meanwhile to `rates`."""
    held, max_seq_len = cell['held'], cell['max_seq_len']
    compiled = s.compile and 'compile' in s.given
    rounds = {name: DecodeRound(model, batches[name], held, max_seq_len, s.steps, kv_dtypes[name],
                                compiled, s.captured)
              for name, model in models.items()}
    title = f"context {cell['context']}, batch {' and '.join(map(str, dict.fromkeys(batches.values())))}"
    found = clock.alternate({'bandwidth': bandwidth} | rounds, s.repeats, title)
    rates += found['bandwidth']
    sides = {name: figures(one, found[name], found['bandwidth']) for name, one in rounds.items()}
    ours = sides['ours']['tokens_per_second']['each']
    ratios = {name: clock.paired(ours, side['tokens_per_second']['each']) for name, side in sides.items() if name != 'ours'}
    return {'sides': sides, 'ratios': {'tokens_per_second': ratios}}


def figures(one: DecodeRound, tpots, rates) -> dict:
    """One side: times, bytes stored and read, and the share of the bandwidth measured in the same round."""
    cache, plan = one.cache, one.model.plan
    batch = cache.batch_size
    kv_read = kv_read_per_step(plan, cache.kv_dtype, batch, one.held, one.steps)
    weights = weight_read_bytes(one.model, batch)
    reached = [(kv_read + weights) / seconds for seconds in tpots]
    return {'batch': batch, 'tpot_ms': clock.summary(1000 * x for x in tpots),
            'tokens_per_second': clock.summary(batch / x for x in tpots), 'kv_bytes': cache.nbytes,
            'kv_read_bytes_per_step': kv_read, 'weight_read_bytes_per_step': weights,
            'read_bytes_per_second': clock.summary(reached), 'bandwidth_share': clock.paired(reached, rates)}
