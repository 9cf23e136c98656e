"""What the modes lengths and recompute start from: checked settings, models, training steps ready to be timed."""
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
    facts,
    model_config,
    numbers,
    random_tokens,
    vanilla_config,
)
from training.device import autocast, pick_dtype


def training_models(s, data_root: Path):
    """What the settings ask for: contexts, batches, name -> model with float32 parameters, and the facts of the run.

    Raises:
        UserError: settings that have no meaning where training is timed.
    """
    at_least(s, repeats=MIN_REPEATS)
    if s.budget or s.weight_dtype != 'auto':
        raise UserError(f'mode={s.mode!r} trains: budget and weight_dtype have no meaning there')
    if s.compile and 'compile' in s.given:
        raise UserError(f"compile=True: mode={s.mode!r} times the steps as they are; mode='train' compiles them")
    contexts, batches = numbers('contexts', s.contexts), numbers('batch_sizes', s.batch_sizes)
    config = model_config(s, data_root)
    check_length(config, contexts)
    torch.manual_seed(s.seed)
    torch.set_float32_matmul_precision('high')  # as train.py
    models = {'ours': build(config, s, torch.float32)}
    if s.against:
        models['vanilla'] = build(vanilla_config(config, max(contexts)), s, torch.float32)
    dtype = pick_dtype(s.dtype, models['ours'].device)
    return contexts, batches, models, facts(s, models) | {'dtype': str(dtype).removeprefix('torch.')}


class TrainingSteps:
    """A model, its optimizer and one fixed batch; call it for the seconds of a step: forward, backward, update.

    optimizer: makes one for the model, AdamW if None.
    """

    def __init__(self, model, batch: int, context: int, dtype: torch.dtype, optimizer=None):
        self.model = model.train()
        with contextlib.redirect_stdout(io.StringIO()):  # it counts its parameters aloud, as nanoGPT's does
            self.optimizer = optimizer(model) if optimizer else \
                model.configure_optimizers(1e-2, 1e-4, (0.9, 0.95), model.device.type)
        self.batch = random_tokens(model, batch, context), random_tokens(model, batch, context)  # (B, T) each
        self.autocast, self.scaler = autocast(model.device, dtype), torch.amp.GradScaler(
            model.device.type, enabled=dtype == torch.float16)

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
