"""--mode=recompute: the activation memory saved by each recomputation policy, and its time cost.

All policies are interleaved on one model and batch, with the chunked loss; 'whole logits' is policy
'none' with the usual loss. Activations are the tensors that the forward pass keeps for the backward
pass, except for logits and loss.
"""
from pathlib import Path

import torch

from common.errors import UserError
from lab.benchmarks import clock, setting
from lab.benchmarks.train import TrainingSteps
from training.native.loading import training_dtype, wanted
from training.native.modules import speed_up
from training.step.loss import linear_cross_entropy
from training.memory.measure import measure as measure_memory
from training.memory.recompute import Recompute, set_recompute

WHOLE = 'whole logits'


def run(s, data_root: Path) -> dict:
    """The document with all cells. UserError: if settings have no meaning for timing training."""
    if s.weight_dtype != 'auto':
        raise UserError(f'weight_dtype={s.weight_dtype!r}: has no meaning in mode={s.mode!r}')
    if setting.compiles(s):
        raise UserError(f'compile=True: mode={s.mode!r} times uncompiled steps; '
                        "mode='train' compiles them")
    names = list(dict.fromkeys(['none', *s.policies.split(',')]))  # the baseline is always measured
    for name in names:
        Recompute.parse(name, s.n_layer)
    shapes, config = setting.begin(s, data_root)
    torch.set_float32_matmul_precision('high')  # as in train.py
    models = setting.compared(config, max(shapes)[0], s, torch.float32)
    device = models['ours'].device
    dtype = training_dtype(s.dtype, s.compile, device)
    if wanted(s.dtype, s.compile, device):
        for model in models.values():
            speed_up(model)
    cells = []
    for context, batch in shapes:
        for name, model in models.items():
            cells.append({'model': name, 'context': context} | measure(
                TrainingSteps(model, batch, context, dtype), [*names, WHOLE], s.repeats,
                f'{name}: sequences of {context}, batch {batch}'))
    return setting.facts(s, models) | {'dtype': str(dtype).removeprefix('torch.'), 'cells': cells}


def choose(steps: TrainingSteps, policy: str) -> TrainingSteps:
    set_recompute(steps.model, 'none' if policy == WHOLE else policy)
    steps.model.loss_fn = None if policy == WHOLE else linear_cross_entropy
    return steps


def gradients(steps: TrainingSteps, policy: str) -> torch.Tensor:
    """All gradients as one vector."""
    choose(steps, policy).backward()
    found = torch.cat([p.grad.flatten() for p in steps.model.parameters()])
    steps.optimizer.zero_grad(set_to_none=True)
    return found


def memory_of(steps: TrainingSteps, policy: str) -> dict:
    """Bytes, as measured by `training.memory`; allocated_peak: a step's peak in bytes
    according to the CUDA allocator, None on other devices."""
    choose(steps, policy)
    memory, peak = vars(measure_memory(steps.model, steps.batch, steps.autocast)), None
    if steps.device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(steps.device)
        steps()
        peak = torch.cuda.max_memory_allocated(steps.device)
    return memory | {'allocated_peak': peak}


def measure(steps: TrainingSteps, names, repeats: int, title: str) -> dict:
    """Each policy's metrics for a model, batch and context, and ratios to 'none'."""
    expected = gradients(steps, 'none')
    errors = {name: ((gradients(steps, name) - expected).norm() / expected.norm()).item()
              for name in names}
    del expected
    times = clock.alternate({name: lambda name=name: choose(steps, name)() for name in names},
                            repeats, title)
    memory = {name: memory_of(steps, name) for name in names}
    batch, context = steps.batch[0].shape
    sides = {name: {'batch': batch, **clock.metrics(seconds, 'step_ms', batch * context),
                    'memory': memory[name], 'gradient_difference': errors[name],
                    'activations_saved':
                        1 - memory[name]['activations'] / memory['none']['activations']}
             for name, seconds in times.items()}
    return {'sides': sides, 'ratios': {'step_time': clock.faster(sides, 'none')}}
