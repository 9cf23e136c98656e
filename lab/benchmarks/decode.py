"""--mode=decode: time per output token (TPOT), greedy, from filled caches.

A round fills the cache with `held` random tokens, then takes `steps` steps of one token per row;
its TPOT is the time of all steps over their number. Every round also measures the memory bandwidth;
the share of it that decoding reaches is a median over rounds.

    without budget   held = context, room for context + steps
    with budget      room for exactly context tokens, the last `steps` of them timed; batch: as many
                     rows as fit
"""
import copy
from pathlib import Path

import torch

from config.errors import UserError, at_least
from config.sizes import parse_bytes
from engine.decode import fast_decode
from lab.benchmarks import clock, generation, peers
from lab.benchmarks.bandwidth import Bandwidth
from lab.benchmarks.memory import kv_read_per_step, most_sequences, weight_read_bytes
from lab.benchmarks.setting import (
    MIN_REPEATS,
    build,
    check_length,
    check_nanogpt_unused,
    compiles,
    facts,
    make_cache,
    model_config,
    numbers,
    random_tokens,
    vanilla_config,
)


class DecodeRound:
    """Call it for the seconds per token (of all rows together) of one round."""

    def __init__(self, model, batch: int, held: int, max_seq_len: int, steps: int, kv_dtype: str,
                 compiled: bool = False, captured: bool = True):
        self.model, self.held, self.steps = model, held, steps
        self.cache = make_cache(model, batch, max_seq_len, kv_dtype)
        self.decode = fast_decode(model, self.cache, captured, compiled)
        self.first = random_tokens(model, batch, 1)                           # (B, 1)

    @torch.inference_mode()
    def __call__(self) -> float:
        self.cache.fill_(self.held)
        decode, tokens = self.decode, self.first
        if decode:
            decode.prepare(self.cache.batch_size)
        with clock.Stopwatch(self.model.device) as watch:
            for _ in range(self.steps):
                if decode:
                    logits = decode(tokens)
                else:
                    logits = self.model(tokens, cache=self.cache)[0][:, -1]
                tokens = logits.argmax(-1, keepdim=True)
        return watch.seconds / self.steps


def run(s, data_root: Path) -> dict:
    """The document with all cells."""
    at_least(s, steps=1, repeats=MIN_REPEATS)
    if s.against in generation.ENGINES:
        return generation.run(s, data_root)
    if s.against in peers.PACKAGES:
        return peers.run(s, data_root)
    check_nanogpt_unused(s)
    contexts, batches = numbers('contexts', s.contexts), numbers('batch_sizes', s.batch_sizes)
    budget = checked_budget(s, contexts)
    further = 0 if budget else s.steps
    config = model_config(s, data_root)
    check_length(config, contexts, further)
    torch.manual_seed(s.seed)
    models = compared_models(config, max(contexts) + further, s)
    kv_dtypes = {name: 'float32' if 'float32' in name else s.kv_dtype for name in models}
    document = facts(s, models) | {'steps': s.steps, 'budget': budget}
    bandwidth, rates, cells = Bandwidth(models['ours'].device), [], []
    for context in contexts:
        cell = {'context': context, 'held': context + further - s.steps,
                'max_seq_len': context + further}
        if budget:
            cell['capacity'] = {
                name: most_sequences(model, budget, context, kv_dtypes[name], s.budget)
                for name, model in models.items()}
            rows = [{name: fit['sequences'] for name, fit in cell['capacity'].items()}]
        else:
            rows = [dict.fromkeys(models, batch) for batch in batches]
        cells += [cell | measure(models, kv_dtypes, cell, each, s, bandwidth, rates)
                  for each in rows]
    return document | {'bandwidth': bandwidth.describe(rates), 'cells': cells}


def compared_models(config, longest: int, s) -> dict:
    """Name -> model: ours, and the baseline that the settings ask for."""
    models, vanilla = {'ours': build(config, s)}, vanilla_config(config, longest)
    if s.against == 'vanilla':
        models['vanilla'] = build(vanilla, s)
    elif s.against == 'vanilla_float32':
        plain = copy.copy(s)
        plain.given, plain.dtype, plain.weight_dtype = s.given, 'float32', 'auto'
        models['vanilla float32'] = build(vanilla, plain)
    elif s.against == 'float32_kv':
        models['float32 K/V'] = models['ours']
    return models


def checked_budget(s, contexts) -> int:
    """Bytes; 0 = none."""
    if not s.budget:
        return 0
    if 'batch_sizes' in s.given:
        raise UserError(f'batch_sizes={s.batch_sizes!r} and budget={s.budget!r} both set the '
                        'number of sequences: leave one out')
    if min(contexts) <= s.steps:
        raise UserError(f'contexts: {min(contexts)} tokens leave no room for steps={s.steps} and '
                        'one before them')
    return parse_bytes(s.budget)


def measure(models, kv_dtypes, cell, batches, s, bandwidth, rates) -> dict:
    """Metrics of each model and the ratios; appends the measured bandwidths to `rates`."""
    rounds = {name: DecodeRound(model, batches[name], cell['held'], cell['max_seq_len'], s.steps,
                                kv_dtypes[name], compiles(s), s.captured)
              for name, model in models.items()}
    sizes = ' and '.join(map(str, dict.fromkeys(batches.values())))
    results = clock.alternate({'bandwidth': bandwidth} | rounds, s.repeats,
                              f"context {cell['context']}, batch {sizes}")
    measured = results.pop('bandwidth')
    rates += measured
    sides = {name: metrics(rounds[name], tpots, measured) for name, tpots in results.items()}
    speeds = {name: side['tokens_per_second']['each'] for name, side in sides.items()}
    ratios = {name: clock.paired(speeds['ours'], speeds[name]) for name in sides if name != 'ours'}
    return {'sides': sides, 'ratios': {'tokens_per_second': ratios}}


def metrics(side: DecodeRound, tpots, rates) -> dict:
    """Times, bytes stored and read, and the share of the bandwidth measured in the same round."""
    cache, batch = side.cache, side.cache.batch_size
    kv_read = kv_read_per_step(side.model.plan, cache.kv_dtype, batch, side.held, side.steps)
    weights = weight_read_bytes(side.model, batch)
    reached = [(kv_read + weights) / seconds for seconds in tpots]
    return {'batch': batch, **clock.metrics(tpots, 'tpot_ms', batch), 'kv_bytes': cache.nbytes,
            'kv_read_bytes_per_step': kv_read, 'weight_read_bytes_per_step': weights,
            'read_bytes_per_second': clock.summary(reached),
            'bandwidth_share': clock.paired(reached, rates)}
