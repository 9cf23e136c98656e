"""--mode=lengths: training steps on sequences of different lengths; a step is forward, backward and AdamW update.

Local layers cost a training step O(T * W) where vanilla ones cost O(T * T): this shows from which length on it is felt.
"""
from pathlib import Path

from lab.benchmarks import clock
from lab.benchmarks.report import show
from lab.benchmarks.steps import TrainingSteps, training_models
from training.device import pick_dtype
from training.flops import achieved
from training.loss import linear_cross_entropy
from training.recompute import set_recompute


def run(s, data_root: Path) -> dict:
    """All cells, printed as a table; returns what --json prints."""
    contexts, batches, models, document = training_models(s, data_root)
    for model in models.values():
        set_recompute(model, s.recompute)
        model.loss_fn = linear_cross_entropy if s.chunked_loss else None
    document |= {'recompute': s.recompute, 'chunked_loss': s.chunked_loss}
    document['cells'] = [measure(models, batch, context, s) for context in contexts for batch in batches]
    show(document)
    return document


def measure(models, batch, context, s) -> dict:
    """Figures of each side at one batch and context, and the ratios between them."""
    steps = {name: TrainingSteps(model, batch, context, pick_dtype(s.dtype, model.device)) for name, model in models.items()}
    found = clock.alternate(steps, s.repeats, f'sequences of {context}, batch {batch}')
    sides = {name: {'batch': batch, 'step_ms': clock.summary(1000 * x for x in seconds),
                    'tokens_per_second': clock.summary(batch * context / x for x in seconds),
                    'model_tflops_per_second': clock.summary(achieved(models[name], batch, x, context) for x in seconds)}
             for name, seconds in found.items()}
    ratios = {name: clock.paired(found[name], found['ours']) for name in models if name != 'ours'}
    return {'context': context, 'sides': sides, 'ratios': {'tokens_per_second': ratios}}
