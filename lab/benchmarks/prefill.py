"""--mode=prefill: time to first token (TTFT) from an empty cache, in one call or in chunks."""
import copy
from pathlib import Path

import torch

from kv.plan import KVPlan
from lab.benchmarks import clock, setting


class Untrimmed(KVPlan):
    """The same plan, except that prefill computes every token in every layer."""
    last_owner = property(lambda plan: len(plan.layers))


class PrefillRound:
    """Callable that returns the seconds from prompts to first tokens, for all rows together."""

    def __init__(self, model, batch: int, context: int, chunk: int, kv_dtype: str):
        self.model, self.chunk = model, chunk or context
        self.cache = model.new_cache(batch, context, kv_dtype)
        self.prompts = setting.random_tokens(model, batch, context)                   # (B, T)

    @torch.inference_mode()
    def __call__(self) -> float:
        self.cache.reset()
        return clock.seconds(self.model.device, self.prefill)

    def prefill(self) -> None:
        for piece in self.prompts.split(self.chunk, dim=1):
            logits = self.model(piece, cache=self.cache)[0]                   # (B, 1, V)
        logits[:, -1].argmax(-1)


def run(s, data_root: Path) -> dict:
    """The document with all cells."""
    shapes, config = setting.begin(s, data_root, prefill_chunk=0)
    models = setting.compared(config, max(shapes)[0], s)
    if s.against == 'untrimmed':
        models['untrimmed'] = copy.copy(models['ours'])
        models['untrimmed'].plan = Untrimmed(**vars(models['ours'].plan))
    cells = []
    for context, batch in shapes:
        rounds = {name: PrefillRound(model, batch, context, s.prefill_chunk, s.kv_dtype)
                  for name, model in models.items()}
        times = clock.alternate(rounds, s.repeats, f'prompts of {context}, batch {batch}')
        sides = {name: {'batch': batch, **clock.metrics(seconds, 'ttft_ms', batch * context),
                        'kv_bytes': rounds[name].cache.nbytes} for name, seconds in times.items()}
        cells.append({'context': context, 'sides': sides, 'ratios': {'ttft': clock.faster(sides)}})
        del rounds  # so that only the caches of one cell are in memory
    return setting.facts(s, models) | {'prefill_chunk': s.prefill_chunk, 'cells': cells}
