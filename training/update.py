"""The optimizer's step of an iteration, left out where the loss or a gradient is not finite.

A NaN or an infinity that reaches AdamW stays in its moments and in the weights for good, so the step is skipped and counted
instead, as loss scaling does for float16 (Micikevicius et al. 2017, "Mixed precision training", section 3.2). Nothing here
waits for the device: the fused AdamW takes the flag as a tensor (`found_inf`, made for torch.amp.GradScaler) and does nothing
where it is set, and the counts stay on the device until `read`.
"""
import math
from dataclasses import dataclass

import torch

from training.fsdp import full

HEALTHY_SCALE = 1.0  # an overflow while the loss is scaled by more than this is ordinary: the scaler is finding its scale


def propagate_nonfinite(loss: torch.Tensor) -> torch.Tensor:
    """The same loss, of which all gradients are NaN unless it is finite: 1 + 0 * loss is exactly 1 there.

    So the gradients alone say whether to step, and where ranks average them, all ranks see what happened on one.
    """
    return loss * (1 + 0 * loss.detach())


@dataclass(frozen=True)
class Updates:
    """What `GuardedUpdate.read` found, as plain numbers.

    skipped: iterations without a step, in all; new: since it was last read; latest: the last of them (-1: none).
    in_row: those at the end of the run so far that count against `max_skipped`.
    grad_norm: of the last iteration, unscaled, before clipping. loss_scale: None without a scaler.
    finite_loss: this rank's loss in the last iteration that was not skipped (NaN: none).
    """
    skipped: int
    new: int
    latest: int
    in_row: int
    grad_norm: float
    loss_scale: float | None
    finite_loss: float


class GuardedUpdate:
    """Unscales and clips the gradients, steps the optimizer where they are finite, and counts where they are not.

    An iteration counts towards a broken run only where the loss scale has come down to `HEALTHY_SCALE`: from 65536, where a
    scaler begins, that takes 16 skipped iterations, which say nothing against the run.

    Args:
        scaler: torch.amp.GradScaler; not enabled for anything but float16.
        grad_clip: largest norm of all gradients together; 0 = any.
    """

    def __init__(self, optimizer, scaler, grad_clip: float, device: torch.device):
        self.optimizer, self.scaler, self.grad_clip = optimizer, scaler, grad_clip
        self.on_device = bool(optimizer.param_groups[0].get('fused'))
        self.one = torch.ones((), device=device)
        self.norm, self.finite_loss = self.one * torch.nan, self.one * torch.nan
        self.counts = torch.tensor([0, 0, -1], device=device)  # skipped, in a row, latest
        self.told = 0

    def restore(self, skipped: int) -> None:
        """Go on counting from what an interrupted run had."""
        self.counts[0] = self.told = skipped

    def __call__(self, iter_num: int, loss: torch.Tensor) -> None:
        """Update the parameters from their gradients, which are dropped. loss: of the last micro-batch, unscaled."""
        self.scaler.unscale_(self.optimizer)
        parameters = [p for group in self.optimizer.param_groups for p in group['params']]
        if self.grad_clip != 0.0:
            self.norm = full(torch.nn.utils.clip_grad_norm_(parameters, self.grad_clip))
        else:
            self.norm = full(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        bad = ~self.norm.isfinite()
        self._step(bad)
        counts = self.scaler.scale(self.one) <= HEALTHY_SCALE  # `scale` in place of `get_scale`, which waits for the device
        skipped, in_row, latest = self.counts
        self.counts = torch.stack([skipped + bad, torch.where(bad, in_row + counts, 0), torch.where(bad, iter_num, latest)])
        self.finite_loss = torch.where(bad, self.finite_loss, loss)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _step(self, bad):
        """In place of GradScaler.step, which knows of overflows but not of norms, and does nothing without float16."""
        if self.on_device:
            self.optimizer.found_inf = bad.float()
            try:
                self.optimizer.step()
            finally:
                del self.optimizer.found_inf  # the optimizer is pickled and used elsewhere too
        elif not bad.item():
            self.optimizer.step()

    @property
    def skipped(self) -> int:
        """Iterations skipped so far; waits for the device."""
        return int(self.counts[0])

    @property
    def in_row(self) -> int:
        """Iterations skipped in a row up to now that count towards a broken run; waits for the device."""
        return int(self.counts[1])

    def read(self) -> Updates:
        """Everything counted so far; waits for the device."""
        skipped, in_row, latest = self.counts.tolist()
        new, self.told = skipped - self.told, skipped
        return Updates(skipped, new, latest, in_row, self.norm.item(),
                       self.scaler.get_scale() if self.scaler.is_enabled() else None, self.finite_loss.item())


def broken(seen: Updates, iter_num: int, loss: float, lr: float, s, saved) -> str:
    """What is said of a run that ends here. s: train.py's settings. saved: path of the run's checkpoint, or None."""
    what = f'gradient norm is {seen.grad_norm} (loss {loss:.4f})' if math.isfinite(loss) else f'loss is {loss}'
    scale = '' if seen.loss_scale is None else f', loss scale {seen.loss_scale:g}'
    last = 'no loss was finite yet' if math.isnan(seen.finite_loss) else f'last finite loss {seen.finite_loss:.4f}'
    state = f'{saved} has the last saved state' if saved else 'nothing has been saved yet'
    clip = f'grad_clip below {s.grad_clip:g}' if s.grad_clip else 'grad_clip=1 (it is off)'
    return (f'iteration {iter_num}: the {what}, and {seen.in_row} iterations in a row were skipped for such reasons '
            f'(max_skipped={s.max_skipped}); learning rate {lr:g}{scale}, {last}. They left the weights as they were; {state}. '
            f'Try a lower learning_rate, a longer warmup_iters, {clip}, dtype=bfloat16 or float32')
