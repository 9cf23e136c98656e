"""--mode=prefill: time to first token (TTFT): prompts into an empty cache, whole or in chunks, and the argmax."""
import copy
from pathlib import Path

import torch

from config.errors import UserError, at_least
from kv.plan import KVPlan
from lab.benchmarks import clock, vllm
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


class Untrimmed(KVPlan):
    """The same plan, by which prefill computes every token in every layer."""
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
                logits = self.model(piece, cache=self.cache)[0]               # (B, 1, V): of the last token alone
            logits[:, -1].argmax(-1)
        return watch.seconds


def run(s, data_root: Path) -> dict:
    """All cells, printed as a table; returns what --json prints."""
    if s.against == 'vllm':
        return vllm.run(s, data_root)
    at_least(s, repeats=MIN_REPEATS, prefill_chunk=0)
    if s.budget:
        raise UserError(f"budget={s.budget!r}: counts in mode='decode' alone")
    contexts, batches = numbers('contexts', s.contexts), numbers('batch_sizes', s.batch_sizes)
    config = model_config(s, data_root)
    check_length(config, contexts)
    torch.manual_seed(s.seed)
    models = {'ours': build(config, s)}
    if s.against == 'vanilla':
        models['vanilla'] = build(vanilla_config(config, max(contexts)), s)
    elif s.against == 'untrimmed':
        models['untrimmed'] = copy.copy(models['ours'])
        models['untrimmed'].plan = Untrimmed(**vars(models['ours'].plan))
    document = facts(s, models) | {'prefill_chunk': s.prefill_chunk}
    document['cells'] = [measure(models, batch, context, s) for context in contexts for batch in batches]
    show(document)
    return document


def measure(models, batch, context, s) -> dict:
    """Figures of each side at one batch and context, and the ratios between them."""
    rounds = {name: PrefillRound(model, batch, context, s.prefill_chunk, s.kv_dtype) for name, model in models.items()}
    found = clock.alternate(rounds, s.repeats, f'prompts of {context}, batch {batch}')
    sides = {name: {'batch': batch, 'ttft_ms': clock.summary(1000 * x for x in seconds),
                    'tokens_per_second': clock.summary(batch * context / x for x in seconds),
                    'kv_bytes': rounds[name].cache.nbytes} for name, seconds in found.items()}
    ratios = {name: clock.paired(found[name], found['ours']) for name in models if name != 'ours'}
    return {'context': context, 'sides': sides, 'ratios': {'ttft': ratios}}
