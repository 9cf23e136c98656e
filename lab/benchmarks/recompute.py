"""--mode=recompute: the activation memory saved by each recomputation policy, and its time cost.

All policies are interleaved on one model and batch, with the chunked loss; 'whole logits' is policy
'none' with the usual loss. Activations are the tensors that the forward pass keeps for the backward
pass, except for logits and loss.
"""
from pathlib import Path

import torch

from config.errors import UserError
from lab.benchmarks import clock
from lab.benchmarks.steps import TrainingSteps, training_models
from training.device import pick_dtype
from training.loss import linear_cross_entropy
from training.memory_use import measure as measure_memory
from training.recompute import Recompute, set_recompute

WHOLE = 'whole logits'


class Policy:
    """Training steps with one policy. Callable that runs a step and returns its seconds."""

    def __init__(self, steps: TrainingSteps, name: str):
        self.steps, self.name = steps, name

    def choose(self) -> TrainingSteps:
        set_recompute(self.steps.model, 'none' if self.name == WHOLE else self.name)
        self.steps.model.loss_fn = None if self.name == WHOLE else linear_cross_entropy
        return self.steps

    def __call__(self) -> float:
        return self.choose()()

    def memory(self) -> dict:
        """Bytes, as measured by `training.memory_use`; allocated_peak: a step's peak in bytes
        according to the CUDA allocator, None on other devices."""
        steps, peak = self.choose(), None
        memory = measure_memory(steps.model, steps.batch, autocast=steps.autocast,
                                optimizer=steps.optimizer).as_dict()
        if steps.model.device.type == 'cuda':
            torch.cuda.reset_peak_memory_stats(steps.model.device)
            steps()
            peak = torch.cuda.max_memory_allocated(steps.model.device)
        return memory | {'allocated_peak': peak}

    def gradients(self) -> list[torch.Tensor]:
        steps = self.choose()
        steps.backward()
        gradients = [p.grad for p in steps.model.parameters()]
        steps.optimizer.zero_grad(set_to_none=True)
        return gradients


def run(s, data_root: Path) -> dict:
    """The document with all cells."""
    names = [name.strip() for name in s.policies.split(',')]
    if names[0] != 'none' or len(set(names)) < len(names):
        raise UserError(f"policies={s.policies!r}: the first must be 'none', the baseline of the "
                        'others, and each may come only once')
    for name in names:
        Recompute.parse(name, s.n_layer)
    shapes, models, document = training_models(s, data_root)
    cells = [measure(name, model, [*names, WHOLE], batch, context, s)
             for context, batch in shapes for name, model in models.items()]
    return document | {'cells': cells}


def measure(model_name, model, names, batch, context, s) -> dict:
    """One cell: each policy's metrics for a model, batch and context, and ratios to 'none'."""
    steps = TrainingSteps(model, batch, context, pick_dtype(s.dtype, model.device))
    policies = {name: Policy(steps, name) for name in names}
    expected = policies['none'].gradients()
    errors = {name: relative_error(p.gradients(), expected) for name, p in policies.items()}
    del expected
    title = f'{model_name}: sequences of {context}, batch {batch}'
    times = clock.alternate(policies, s.repeats, title)
    memory = {name: policy.memory() for name, policy in policies.items()}
    sides = {}
    for name, seconds in times.items():
        kept = memory[name]['activations'] / memory['none']['activations']
        sides[name] = {'batch': batch, **clock.metrics(seconds, 'step_ms', batch * context),
                       'memory': memory[name], 'gradient_difference': errors[name],
                       'activations_saved': 1 - kept}
    return {'model': model_name, 'context': context, 'sides': sides,
            'ratios': {'step_time': clock.ratios(times, 'none')},
            'loss_saved': 1 - memory['none']['loss_peak'] / memory[WHOLE]['loss_peak']}


def relative_error(gradients, expected) -> float:
    """|gradients - expected| / |expected|, all gradients as one vector, in float64."""
    pairs = zip(gradients, expected, strict=True)
    error = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    return (error / sum(b.double().square().sum() for b in expected)).sqrt().item()
