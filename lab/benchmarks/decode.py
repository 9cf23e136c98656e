"""--mode=decode: time per output token (TPOT), greedy, from filled caches.

A round fills the cache with `held` random tokens, then runs `steps` steps of one token per row.
Every round also measures the memory bandwidth; the share of it that decoding reaches is a median
over rounds. With a budget, the batch is as large as fits and the cache has room for exactly
`contexts` tokens, the last `steps` of them timed; without one, there is room for `steps` more.
"""
from pathlib import Path

import torch

from common.sizes import parse_bytes
from engine.requests.sampler import most_likely
from engine.steps.decode import fast_decode
from lab.benchmarks import clock, setting
from lab.benchmarks.bandwidth import Bandwidth, kv_read_per_step, most_sequences, weight_read_bytes


class DecodeRound:
    """Callable that runs one round and returns the seconds per token (for all rows together)."""

    def __init__(self, model, batch: int, held: int, max_seq_len: int, steps: int, kv_dtype: str,
                 compiled: bool = False, captured: bool = True):
        self.model, self.held, self.steps = model, held, steps
        self.cache = setting.make_cache(model, batch, max_seq_len, kv_dtype)
        self.decode = fast_decode(model, self.cache, captured, compiled)
        self.first = setting.random_tokens(model, batch, 1)                   # (B, 1)

    @torch.inference_mode()
    def __call__(self) -> float:
        self.cache.fill_(self.held)
        if self.decode:
            self.decode.prepare(self.cache.batch_size)
        return clock.seconds(self.model.device, self.generate) / self.steps

    def generate(self) -> None:
        tokens = self.first
        for _ in range(self.steps):
            logits = (self.decode(tokens) if self.decode else
                      self.model(tokens, cache=self.cache)[0][:, -1])
            tokens = most_likely(logits)[:, None]


def run(s, data_root: Path) -> dict:
    """The document with all cells."""
    budget = parse_bytes(s.budget) if s.budget else 0
    further = 0 if budget else s.steps
    shapes, config = setting.begin(s, data_root, steps=1)
    models = setting.compared(config, max(shapes)[0] + further, s)
    kv_dtypes = {name: 'float32' if 'float32' in name else s.kv_dtype for name in models}
    bandwidth, rates, cells = Bandwidth(models['ours'].device), [], []
    for context, batch in shapes:
        cell = {'context': context, 'held': context + further - s.steps,
                'max_seq_len': context + further}
        batches = dict.fromkeys(models, batch)
        if budget:
            cell['capacity'] = {
                name: most_sequences(model.plan, budget, context,
                                     model.resolved_kv_dtype(kv_dtypes[name]))
                for name, model in models.items()}
            batches = {name: fit['sequences'] for name, fit in cell['capacity'].items()}
        rounds = {name: DecodeRound(model, batches[name], cell['held'], cell['max_seq_len'],
                                    s.steps, kv_dtypes[name], setting.compiles(s), s.captured)
                  for name, model in models.items()}
        times = clock.alternate({'bandwidth': bandwidth} | rounds, s.repeats, f'context {context}')
        measured = times.pop('bandwidth')
        sides = {name: metrics(rounds[name], tpots, measured) for name, tpots in times.items()}
        cells.append(cell | {'sides': sides, 'ratios': {'tokens_per_second': clock.faster(sides)}})
        rates += measured
        del rounds  # so that only the caches of one cell are in memory
    return setting.facts(s, models) | {
        'steps': s.steps, 'budget': budget, 'cells': cells,
        'bandwidth': {'kernel': bandwidth.kernel, 'bytes_per_second': clock.summary(rates)}}


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
