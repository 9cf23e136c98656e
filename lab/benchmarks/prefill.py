"""--mode=prefill: time to first token (TTFT) of prompts, whole or in chunks, in an empty cache."""
import copy
from pathlib import Path

import torch

from config.errors import UserError, at_least
from kv.plan import KVPlan
from lab.benchmarks import clock, vllm
from lab.benchmarks.setting import (
    MIN_REPEATS,
    build,
    check_length,
    contexts_and_batches,
    facts,
    make_cache,
    model_config,
    random_tokens,
    vanilla_config,
)


class Untrimmed(KVPlan):
    """The same plan, except that prefill computes every token in every layer."""
    last_owner = property(lambda plan: len(plan.layers))


class PrefillRound:
    """Call it for the seconds from prompts to first tokens, of all rows together."""

    def __init__(self, model, batch: int, context: int, chunk: int, kv_dtype: str):
        self.model, self.chunk = model, chunk or context
        self.cache = make_cache(model, batch, context, kv_dtype)
        self.prompts = random_tokens(model, batch, context)                   # (B, T)

    @torch.inference_mode()
    def __call__(self) -> float:
        self.cache.reset()
        with clock.Stopwatch(self.model.device) as watch:
            for piece in self.prompts.split(self.chunk, dim=1):
                logits = self.model(piece, cache=self.cache)[0]               # (B, 1, V)
            logits[:, -1].argmax(-1)
        return watch.seconds


def run(s, data_root: Path) -> dict:
    """The document with all cells."""
    if s.against == 'vllm':
        return vllm.run(s, data_root)
    at_least(s, repeats=MIN_REPEATS, prefill_chunk=0)
    if s.budget:
        raise UserError(f"budget={s.budget!r}: has an effect only in mode='decode'")
    shapes, config = contexts_and_batches(s), model_config(s, data_root)
    longest = max(shapes)[0]
    check_length(config, [longest])
    torch.manual_seed(s.seed)
    models = {'ours': build(config, s)}
    if s.against == 'vanilla':
        models['vanilla'] = build(vanilla_config(config, longest), s)
    elif s.against == 'untrimmed':
        models['untrimmed'] = copy.copy(models['ours'])
        models['untrimmed'].plan = Untrimmed(**vars(models['ours'].plan))
    cells = [measure(models, batch, context, s) for context, batch in shapes]
    return facts(s, models) | {'prefill_chunk': s.prefill_chunk, 'cells': cells}


def measure(models, batch, context, s) -> dict:
    """One cell: times and bytes of each model, and the ratios."""
    rounds = {name: PrefillRound(model, batch, context, s.prefill_chunk, s.kv_dtype)
              for name, model in models.items()}
    times = clock.alternate(rounds, s.repeats, f'prompts of {context}, batch {batch}')
    sides = {name: {'batch': batch, **clock.metrics(seconds, 'ttft_ms', batch * context),
                    'kv_bytes': rounds[name].cache.nbytes} for name, seconds in times.items()}
    return {'context': context, 'sides': sides, 'ratios': {'ttft': clock.ratios(times)}}
