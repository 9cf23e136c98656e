"""Training steps as the modes train and recompute time them: what train.py does with one batch,
without dropout."""
import contextlib
import io

import torch

from lab.benchmarks import clock
from training.device import autocast
from training.update import GuardedUpdate, propagate_nonfinite

GRAD_CLIP = 1.0  # train.py's default


class TrainingSteps:
    """A model, its optimizer and its batches. Callable that runs a step (forward, backward, clipped
    gradients, update) and returns its seconds; `losses` has the loss of each step.

    next_batch: function that returns (x, y); None: one fixed random batch.
    """

    def __init__(self, model, batch: int, context: int, dtype: torch.dtype, next_batch=None,
                 compiled: bool = False):
        self.model = model.train()
        self.device = next(model.parameters()).device  # nanoGPT's model does not tell it
        self.forward = torch.compile(model) if compiled else model
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
            self.optimizer = model.configure_optimizers(1e-2, 1e-4, (0.9, 0.95),
                                                        self.device.type)
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
