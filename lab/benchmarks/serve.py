"""--mode=serve: requests of different lengths, continuous batching against static.

All are submitted at the start: prompts of `contexts` random tokens, new ones in every round,
greedy, with log-uniform numbers of new tokens. static engine: ours, but it admits requests only
when all rows are free. Both must produce the same texts.
"""
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common.errors import UserError, at_least
from engine.engine import Engine
from engine.requests.params import SamplingParams
from engine.requests.scheduler import Scheduler
from engine.weights.quantized import QuantizedLinear
from lab.benchmarks import clock, setting
from model import GPT

TOLERANCE = 1e-4  # for float32 logits: a larger difference is not due to rounding


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


def through_engine(model, rows: int, max_seq_len: int, lengths, s, **options):
    """Return a function of prompts that serves them with one engine, `lengths` new tokens each."""
    chunk = {'prefill_chunk': s.prefill_chunk} if s.prefill_chunk else {}
    engine = Engine(model, rows, max_seq_len, s.kv_dtype, captured=s.captured, **chunk, **options)
    params = [SamplingParams(max_new_tokens=n, temperature=0) for n in lengths]

    def serve(prompts) -> Served:
        start = clock.now()
        done = engine.generate(prompts, params)
        return Served(clock.now() - start, [c.ttft_s for c in done], [c.tokens for c in done],
                      engine.held_peak)
    return serve


def run(s, data_root: Path) -> dict:
    """The document with all cells."""
    lengths = output_lengths(s)
    shapes, config = setting.begin(s, data_root, prefill_chunk=0)
    model = setting.prepared(GPT(config), s)
    cells = []
    for context, rows in shapes:
        used = min(rows, len(lengths))
        static = through_engine(model, used, context + max(lengths), lengths, s,
                                scheduler=StaticScheduler)
        prompts, results = rounds(model, {'static engine': static}, lengths, context, used, s)
        cell = measure(results, sum(lengths))
        for name, side in cell['sides'].items():
            side |= {'batch': rows, 'kv_held_bytes': max(one.kv_held for one in results[name]),
                     'ttft_ms': clock.summary(1000 * statistics.median(one.firsts)
                                              for one in results[name])}
            if name != 'ours':
                tokens = results['ours'][-1].tokens, results[name][-1].tokens
                side |= same_texts(model, prompts, *tokens, name)
        cells.append(cell | {'context': context})
    return setting.facts(s, {'ours': model}) | {
        'requests': s.requests, 'output_lengths': lengths, 'cells': cells}


def output_lengths(s) -> list[int]:
    """The number of new tokens of each request: their logarithms are uniform between those of the
    lowest and highest of `output_lengths` ('16,256', or one number for both)."""
    at_least(s, requests=1)
    found = setting.numbers('output_lengths', s.output_lengths)
    low, high = found[0], found[-1]
    if len(found) > 2 or high < low:
        raise UserError(f'output_lengths={s.output_lengths!r}: give the shortest and the longest '
                        "length, as '16,256'")
    u = np.random.default_rng(s.seed % 2 ** 64).uniform(math.log(low), math.log(high + 1),
                                                        s.requests)
    return [min(int(math.exp(x)), high) for x in u]


def rounds(model, others: dict, lengths, context: int, rows: int, s):
    """Serve new random prompts in every round. others: name -> function of prompts. Returns the
    last round's prompts, and name -> the rounds of ours and of the others."""
    ours = through_engine(model, rows, context + max(lengths), lengths, s)
    prompts = [setting.random_tokens(model, len(lengths), context).tolist()
               for _ in range(s.repeats + 1)]
    title = f'{len(lengths)} requests, prompts of {context}'
    return prompts[-1], clock.alternate({'ours': ours} | others, s.repeats, title, prompts)


def measure(results: dict[str, list[Served]], tokens: int) -> dict:
    """Seconds and tokens per second of each side for `tokens` tokens a round, and the ratios."""
    sides = {name: clock.metrics([served.seconds for served in runs], 'seconds', tokens, scale=1)
             for name, runs in results.items()}
    return {'sides': sides, 'ratios': {'tokens_per_second': clock.faster(sides)}}


@torch.inference_mode()
def same_texts(model, prompts, ours, theirs, name) -> dict:
    """Count the requests with equal tokens. Where two texts first differ, the top two logits must
    be within TOLERANCE, so that rounding may decide between them; else UserError. In bfloat16 and
    float16, and with quantized weights, rounding is coarser, and texts are only counted."""
    checked = (model.dtype in (torch.float32, torch.float64) and
               not any(isinstance(m, QuantizedLinear) for m in model.modules()))
    unequal = [n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    for n in unequal if checked else []:
        j = next(j for j, (a, b) in enumerate(zip(ours[n], theirs[n], strict=True)) if a != b)
        text = torch.tensor([prompts[n] + ours[n][:j]], device=model.device)
        first, second = model(text)[0][0, -1].topk(2).values.tolist()
        if first - second > TOLERANCE:
            raise UserError(f'ours and {name} differ in token {j} of text {n}, where the '
                            f'likeliest token leads by {first - second:.1e}: more than rounding')
    return {'rows_equal': len(prompts) - len(unequal), 'rows': len(prompts)}
