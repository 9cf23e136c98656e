"""Common to the modes lengths and recompute: checked settings, models, and timed training steps."""
import contextlib
import io
from pathlib import Path

import torch

from config.errors import UserError, at_least
from lab.benchmarks import clock
from lab.benchmarks.setting import (
    MIN_REPEATS,
    build,
    check_length,
    compiles,
    contexts_and_batches,
    facts,
    model_config,
    random_tokens,
    vanilla_config,
)
from training.device import autocast, pick_dtype


def training_models(s, data_root: Path):
    """The (context, batch) pairs, name -> model with float32 parameters, and the facts of the run.

    Raises:
        UserError: settings that have no meaning where training is timed.
    """
    at_least(s, repeats=MIN_REPEATS)
    if s.budget or s.weight_dtype != 'auto':
        raise UserError(f'mode={s.mode!r} trains: budget and weight_dtype have no meaning there')
    if compiles(s):
        raise UserError(f'compile=True: mode={s.mode!r} times uncompiled steps; '
                        "mode='train' compiles them")
    shapes, config = contexts_and_batches(s), model_config(s, data_root)
    longest = max(shapes)[0]
    check_length(config, [longest])
    torch.manual_seed(s.seed)
    torch.set_float32_matmul_precision('high')  # as train.py
    models = {'ours': build(config, s, torch.float32)}
    if s.against:
        models['vanilla'] = build(vanilla_config(config, longest), s, torch.float32)
    dtype = pick_dtype(s.dtype, models['ours'].device)
    return shapes, models, facts(s, models) | {'dtype': str(dtype).removeprefix('torch.')}


class TrainingSteps:
    """A model, its optimizer and one fixed batch; call it for the seconds of a step: forward,
    backward, update.

    optimizer: function of the model that makes its optimizer; None: AdamW.
    """

    def __init__(self, model, batch: int, context: int, dtype: torch.dtype, optimizer=None):
        self.model = model.train()
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
            self.optimizer = optimizer(model) if optimizer else \
                model.configure_optimizers(1e-2, 1e-4, (0.9, 0.95), model.device.type)
        self.batch = tuple(random_tokens(model, batch, context) for _ in 'xy')  # (B, T) each
        self.autocast = autocast(model.device, dtype)
        self.scaler = torch.amp.GradScaler(model.device.type, enabled=dtype == torch.float16)

    def __call__(self) -> float:
        with clock.Stopwatch(self.model.device) as watch:
            self.backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        return watch.seconds

    def backward(self) -> None:
        """Forward and backward; gradients are left in the parameters."""
        with self.autocast:
            loss = self.model(*self.batch)[1]
        self.scaler.scale(loss).backward()
