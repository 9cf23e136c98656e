"""--mode=serve: requests of different lengths, continuous batching against static.

All are submitted at the start: prompts of `contexts` random tokens, greedy, with log-uniform
numbers of new tokens. static: batches in `generate.Generation`, each until its longest request is
done; static engine: ours, but it admits requests only when all rows are free. All must produce the
same texts.
"""
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from config.errors import UserError, at_least
from engine.steps.captured import MIN_CAPTURED
from engine.steps.decode import fast_decode
from engine.requests.scheduler import Scheduler
from generate import Generation, Sampler
from lab.benchmarks import clock, setting, vllm
from lab.benchmarks.generation import same_tokens
from training.device import synchronize


class StaticScheduler(Scheduler):
    """Admits requests only when the engine is empty."""

    def _admit(self):
        if not self.running:
            super()._admit()


@dataclass
class Served:
    """One round: total seconds, seconds to each request's first token, the tokens of each request,
    and the peak number of K/V bytes in use."""
    seconds: float
    firsts: list[float]
    tokens: list[list[int]]
    kv_held: int


class EngineRound:
    """Callable that serves all requests with one engine, which is reused."""

    def __init__(self, model, prompts, lengths, rows, s, scheduler=Scheduler):
        self.prompts, self.lengths = prompts, lengths
        self.engine = setting.make_engine(model, rows, max(map(len, prompts)) + max(lengths), s,
                                          scheduler=scheduler)
        self.kv_bytes = self.engine.cache.nbytes

    def __call__(self) -> Served:
        start = clock.now()
        done = setting.greedy(self.engine, self.prompts, self.lengths)
        return Served(clock.now() - start, [c.ttft_s for c in done], [c.tokens for c in done],
                      self.engine.held_peak)


class StaticRound:
    """Callable that serves all requests in order, in batches of `rows`."""

    def __init__(self, model, prompts, lengths, rows, s):
        self.model, self.prompts, self.lengths = model, prompts, lengths
        self.rows = min(rows, len(prompts))
        self.cache = model.new_cache(self.rows, max(map(len, prompts)) + max(lengths), s.kv_dtype)
        self.kv_bytes = self.cache.nbytes
        captured = s.captured and max(lengths) >= MIN_CAPTURED
        self.decode = fast_decode(model, self.cache, captured)

    def __call__(self) -> Served:
        start, firsts, tokens = clock.now(), [], []
        for k in range(0, len(self.prompts), self.rows):
            prompts, lengths = self.prompts[k:k + self.rows], self.lengths[k:k + self.rows]
            self.cache.reset()
            whole = len(prompts) == self.rows
            cache, decode = (self.cache, self.decode) if whole else (None, None)
            generation = Generation(self.model, prompts, max(lengths), Sampler(0), cache,
                                    decode=decode)
            made = []
            for j, new in enumerate(generation):
                made.append(new.flatten().tolist())  # every step, as a server streams tokens
                if j == 0:
                    firsts += [clock.now() - start] * len(prompts)
            tokens += [[step[b] for step in made[:n]] for b, n in enumerate(lengths)]
        synchronize(self.model.device)
        return Served(clock.now() - start, firsts, tokens, self.kv_bytes)


def run(s, data_root: Path) -> dict:
    """The document with all cells."""
    at_least(s, requests=1)
    low, high = output_range(s.output_lengths)
    lengths = log_uniform(low, high, s.requests, s.seed)
    if s.against == 'vllm':
        return vllm.run(s, data_root, lengths)
    shapes, config = setting.begin(s, data_root, high, prefill_chunk=0)
    model = setting.build(config, s)
    cells = [measure(model, lengths, rows, context, s) for context, rows in shapes]
    return setting.facts(s, {'ours': model}) | {
        'requests': s.requests, 'output_lengths': lengths, 'cells': cells}


def output_range(text: str) -> tuple[int, int]:
    """Parse '16,256' as (16, 256), and a single number as both."""
    found = setting.numbers('output_lengths', text)
    if len(found) > 2 or found[-1] < found[0]:
        raise UserError(f'output_lengths={text!r}: give the shortest and the longest length, as '
                        "'16,256'")
    return found[0], found[-1]


def log_uniform(low: int, high: int, n: int, seed: int) -> list[int]:
    """Return n integers whose logarithms are uniform between those of low and high."""
    u = np.random.default_rng(seed % 2 ** 64).uniform(math.log(low), math.log(high + 1), n)
    return [min(int(math.exp(x)), high) for x in u]


def measure(model, lengths, rows: int, context: int, s) -> dict:
    """One cell: metrics of each side, ratios of ours to each, and whether the texts are equal."""
    prompts = setting.random_tokens(model, len(lengths), context).tolist()
    sides = {'ours': EngineRound(model, prompts, lengths, rows, s),
             'static': StaticRound(model, prompts, lengths, rows, s),
             'static engine': EngineRound(model, prompts, lengths, rows, s, StaticScheduler)}
    results = clock.alternate(sides, s.repeats,
                              f'{len(lengths)} requests, {rows} rows, prompts of {context}')
    seconds = {name: [served.seconds for served in runs] for name, runs in results.items()}
    found = {}
    for name, runs in results.items():
        found[name] = {
            'batch': rows, 'seconds': clock.summary(seconds[name]),
            'tokens_per_second': clock.summary(sum(lengths) / x for x in seconds[name]),
            'ttft_ms': clock.summary(1000 * statistics.median(one.firsts) for one in runs),
            'kv_bytes': sides[name].kv_bytes, 'kv_held_bytes': max(one.kv_held for one in runs)}
        if name != 'ours':
            tokens = results['ours'][-1].tokens, runs[-1].tokens
            found[name] |= same_texts(model, prompts, *tokens, name)
    return {'context': context, 'sides': found,
            'ratios': {'tokens_per_second': clock.ratios(seconds)}}


def same_texts(model, prompts, ours, theirs, name) -> dict:
    """Count the requests with equal tokens. UserError: if others differ by more than rounding."""
    equal = 0
    for request in zip(prompts, ours, theirs, strict=True):
        tensors = (torch.tensor([tokens], device=model.device) for tokens in request)
        equal += same_tokens(model, *tensors, name)['rows_equal']
    return {'rows_equal': equal, 'rows': len(prompts)}
