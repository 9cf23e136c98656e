"""Code common to lengths and recompute: checked settings, models, and timed training steps."""
import contextlib
import io
from pathlib import Path

import torch

from config.errors import UserError
from lab.benchmarks import clock, setting
from training.device import autocast, pick_dtype


def training_models(s, data_root: Path):
    """The (context, batch) pairs, name -> model with float32 parameters, and facts about the run.

    Raises:
        UserError: if settings have no meaning for timing training.
    """
    if s.weight_dtype != 'auto':
        raise UserError(f'weight_dtype={s.weight_dtype!r}: has no meaning in mode={s.mode!r}')
    if setting.compiles(s):
        raise UserError(f'compile=True: mode={s.mode!r} times uncompiled steps; '
                        "mode='train' compiles them")
    shapes, config = setting.begin(s, data_root)
    torch.set_float32_matmul_precision('high')  # as in train.py
    models = {'ours': setting.build(config, s, torch.float32)}
    if s.against:
        vanilla = setting.vanilla_config(config, max(shapes)[0])
        models['vanilla'] = setting.build(vanilla, s, torch.float32)
    dtype = pick_dtype(s.dtype, models['ours'].device)
    return shapes, models, setting.facts(s, models) | {'dtype': str(dtype).removeprefix('torch.')}


class TrainingSteps:
    """A model, its optimizer and one fixed batch. Callable that runs a step (forward, backward,
    update) and returns its seconds.

    optimizer: function that takes the model and returns its optimizer; None: AdamW.
    """

    def __init__(self, model, batch: int, context: int, dtype: torch.dtype, optimizer=None):
        self.model = model.train()
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
            self.optimizer = optimizer(model) if optimizer else \
                model.configure_optimizers(1e-2, 1e-4, (0.9, 0.95), model.device.type)
        # (B, T) each
        self.batch = tuple(setting.random_tokens(model, batch, context) for _ in 'xy')
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
        """Forward and backward; the gradients stay in the parameters."""
        with self.autocast:
            loss = self.model(*self.batch)[1]
        self.scaler.scale(loss).backward()
