"""Training steps as the modes train and recompute time them, and ablate.py: what train.py
does with one batch, without dropout."""
import contextlib
import io
from pathlib import Path

import torch

from config.errors import UserError
from lab.benchmarks import clock, setting
from training import native
from training.device import autocast
from training.update import GuardedUpdate, propagate_nonfinite

GRAD_CLIP = 1.0  # train.py's default


def training_models(s, data_root: Path):
    """The (context, batch) pairs, name -> model with float32 parameters, the dtype of the
    arithmetic, and facts about the run.

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
    models = setting.compared(config, max(shapes)[0], s, torch.float32)
    device = models['ours'].device
    dtype = native.training_dtype(s, device)
    if native.wanted(s, device):
        for model in models.values():
            native.speed_up(model)
    document = setting.facts(s, models) | {'dtype': str(dtype).removeprefix('torch.')}
    return shapes, models, dtype, document


class TrainingSteps:
    """A model, its optimizer and its batches. Callable that runs a step (forward, backward, clipped
    gradients, update) and returns its seconds; `losses` has the loss of each step.

    optimizer: function that takes the model and returns its optimizer; None: AdamW.
    next_batch: function that returns (x, y); None: one fixed random batch.
    """

    def __init__(self, model, batch: int, context: int, dtype: torch.dtype, optimizer=None,
                 next_batch=None, compiled: bool = False):
        self.model = model.train()
        self.device = next(model.parameters()).device  # nanoGPT's model does not tell it
        self.forward = torch.compile(model) if compiled else model
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
            self.optimizer = optimizer(model) if optimizer else \
                model.configure_optimizers(1e-2, 1e-4, (0.9, 0.95), self.device.type)
        if next_batch is None:
            x, y = torch.randint(model.config.vocab_size, (2, batch, context), device=self.device)
            next_batch = lambda: (x, y)
        self.next_batch = next_batch
        self.batch, self.losses = next_batch(), []  # (B, T) each
        self.autocast = autocast(self.device, dtype)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        self.update = GuardedUpdate(self.optimizer, self.scaler, GRAD_CLIP, self.device)

    def __call__(self) -> float:
        return clock.seconds(self.device, self.step)

    def step(self) -> None:
        loss = self.backward()
        self.update(len(self.losses), loss)
        self.losses.append(loss.item())

    def backward(self) -> torch.Tensor:
        """Forward and backward; the gradients stay in the parameters. Returns the loss."""
        with self.autocast:
            loss = propagate_nonfinite(self.forward(*self.batch)[1])
        self.batch = self.next_batch()  # fetched while the device is busy
        self.scaler.scale(loss).backward()
        return loss.detach()
