"""--mode=lengths: training steps (forward, backward, AdamW) on sequences of different lengths.

In a training step a local layer costs O(T * W), a vanilla one O(T * T); this shows the length from
which the difference matters.
"""
from pathlib import Path

from lab.benchmarks import clock
from lab.benchmarks.steps import TrainingSteps, training_models
from training.flops import achieved
from training.loss import linear_cross_entropy
from training.recompute import set_recompute


def run(s, data_root: Path) -> dict:
    """The document with all cells."""
    shapes, models, dtype, document = training_models(s, data_root)
    for model in models.values():
        set_recompute(model, s.recompute)
        model.loss_fn = linear_cross_entropy if s.chunked_loss else None
    cells = []
    for context, batch in shapes:
        steps = {name: TrainingSteps(model, batch, context, dtype)
                 for name, model in models.items()}
        times = clock.alternate(steps, s.repeats, f'sequences of {context}, batch {batch}')
        sides = {name: {'batch': batch, **clock.metrics(seconds, 'step_ms', batch * context),
                        'model_tflops_per_second': clock.summary(
                            achieved(models[name], batch, x, context) for x in seconds)}
                 for name, seconds in times.items()}
        cells.append({'context': context, 'sides': sides,
                      'ratios': {'tokens_per_second': clock.ratios(times)}})
        del steps  # and the states of their optimizers
    return document | {'recompute': s.recompute, 'chunked_loss': s.chunked_loss, 'cells': cells}
