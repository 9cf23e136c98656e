"""--mode=recompute: what each recomputation policy saves of a training step's activations, and what it costs in time.

All policies take turns on one model, one batch, with the loss in chunks; 'whole logits' is policy 'none' with the loss as it
is usually computed. Activations are what a forward pass leaves behind for the backward pass, without logits and loss.
"""
from pathlib import Path

import torch

from config.errors import UserError
from lab.benchmarks import clock
from lab.benchmarks.report import show
from lab.benchmarks.steps import TrainingSteps, training_models
from training.device import pick_dtype
from training.loss import linear_cross_entropy
from training.memory_use import measure as measure_memory
from training.recompute import Recompute, set_recompute

WHOLE = 'whole logits'


class Policy:
    """Training steps under one policy."""

    def __init__(self, steps: TrainingSteps, name: str):
        self.steps, self.name = steps, name

    def __call__(self) -> float:
        self.choose()
        return self.steps()

    def choose(self) -> None:
        set_recompute(self.steps.model, 'none' if self.name == WHOLE else self.name)
        self.steps.model.loss_fn = None if self.name == WHOLE else linear_cross_entropy

    def memory(self) -> dict:
        """Bytes, by `training.memory`."""
        self.choose()
        return measure_memory(self.steps.model, self.steps.batch, autocast=self.steps.autocast,
                              optimizer=self.steps.optimizer).as_dict()

    def allocated_peak(self) -> int | None:
        """Most bytes of a step by the CUDA allocator's own count; None on other devices."""
        if self.steps.model.device.type != 'cuda':
            return None
        self.choose()
        torch.cuda.reset_peak_memory_stats(self.steps.model.device)
        self.steps()
        return torch.cuda.max_memory_allocated(self.steps.model.device)

    def gradients(self) -> list[torch.Tensor]:
        self.choose()
        self.steps.backward()
        found = [p.grad for p in self.steps.model.parameters()]
        self.steps.optimizer.zero_grad(set_to_none=True)
        return found


def run(s, data_root: Path) -> dict:
    """All cells, printed as a table; returns what --json prints."""
    policies = [name.strip() for name in s.policies.split(',')]
    if policies[0] != 'none' or len(set(policies)) < len(policies):
        raise UserError(f"policies={s.policies!r}: first 'none', which the others are compared with, and each of them once")
    for name in policies:
        Recompute.parse(name, s.n_layer)
    contexts, batches, models, document = training_models(s, data_root)
    document['cells'] = [measure(name, model, policies + [WHOLE], batch, context, s)
                         for context in contexts for batch in batches for name, model in models.items()]
    show(document)
    return document


def measure(model_name, model, names, batch, context, s) -> dict:
    """Figures of each policy for one model, batch and context, and their ratios to those of 'none'."""
    steps = TrainingSteps(model, batch, context, pick_dtype(s.dtype, model.device))
    policies = {name: Policy(steps, name) for name in names}
    truth = policies['none'].gradients()
    off = {name: difference(policy.gradients(), truth) for name, policy in policies.items()}
    del truth
    found = clock.alternate(policies, s.repeats, f'{model_name}: sequences of {context}, batch {batch}')
    held = {name: policy.memory() | {'allocated_peak': policy.allocated_peak()} for name, policy in policies.items()}
    sides = {name: {'batch': batch, 'step_ms': clock.summary(1000 * x for x in seconds),
                    'tokens_per_second': clock.summary(batch * context / x for x in seconds), 'memory': held[name],
                    'gradient_difference': off[name],
                    'activations_saved': 1 - held[name]['activations'] / held['none']['activations']}
             for name, seconds in found.items()}
    ratios = {name: clock.paired(found[name], found['none']) for name in names if name != 'none'}
    return {'model': model_name, 'context': context, 'sides': sides, 'ratios': {'step_time': ratios},
            'loss_saved': 1 - held['none']['loss_peak'] / held[WHOLE]['loss_peak']}


def difference(some, truth) -> float:
    """Of all gradients as one vector, relative: |some - truth| / |truth|, in float64."""
    error = sum((a.double() - b.double()).square().sum() for a, b in zip(some, truth, strict=True))
    return (error / sum(b.double().square().sum() for b in truth)).sqrt().item()
