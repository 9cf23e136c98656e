"""An iteration's optimizer step, skipped if the loss or a gradient is not finite.

A NaN or infinity in AdamW's moments or in the weights would never go away, so the step is skipped
and counted, as loss scaling does for float16 (Micikevicius et al. 2017, "Mixed precision training",
section 3.2). Nothing here waits for the device: fused AdamW accepts a tensor flag (`found_inf`,
meant for torch.amp.GradScaler), and the counts stay on the device until `read`.
"""
import math
from dataclasses import dataclass

import torch

from training.parallel.fsdp import full

HEALTHY_SCALE = 1.0  # overflows at a larger loss scale are normal: the scaler is still adapting


def propagate_nonfinite(loss: torch.Tensor) -> torch.Tensor:
    """Return the same loss, but with NaN for all gradients if it is not finite. Thus whether to
    step depends only on the gradients, which are averaged over the ranks."""
    return loss * (1 + 0 * loss.detach())


@dataclass(frozen=True)
class Updates:
    """Counts from a `GuardedUpdate`, as plain numbers."""
    skipped: int               # iterations without a step
    new: int                   # those since the last read
    latest: int                # the last one; -1 = none
    in_row: int                # the latest consecutive ones that count against `max_skipped`
    grad_norm: float           # of the last iteration, unscaled, before clipping
    loss_scale: float | None   # None without a scaler
    finite_loss: float         # of this rank, in the last iteration not skipped; NaN = none


class GuardedUpdate:
    """Unscales and clips the gradients, and steps the optimizer if they are finite. A skipped
    iteration counts against `max_skipped` only once the loss scale, initially 65536, is down to
    `HEALTHY_SCALE`. scaler: torch.amp.GradScaler. grad_clip: maximum norm; 0 = unlimited."""

    def __init__(self, optimizer, scaler, grad_clip: float, device: torch.device):
        self.optimizer, self.scaler, self.grad_clip = optimizer, scaler, grad_clip
        self.fused = bool(optimizer.param_groups[0].get('fused'))
        self.one = torch.ones((), device=device)
        self.norm, self.finite_loss = self.one * torch.nan, self.one * torch.nan
        self.counts = torch.tensor([0, 0, -1], device=device)  # skipped, in a row, latest
        self.reported = 0

    def __call__(self, iter_num: int, loss: torch.Tensor) -> None:
        """Update the parameters, drop their gradients. loss: the last micro-batch's, unscaled."""
        self.scaler.unscale_(self.optimizer)
        parameters = [p for group in self.optimizer.param_groups for p in group['params']]
        self.norm = full(torch.nn.utils.clip_grad_norm_(parameters, self.grad_clip or math.inf))
        bad = ~self.norm.isfinite()
        # replaces GradScaler.step, which ignores norms and does nothing without float16
        if self.fused:
            self.optimizer.found_inf = bad.float()
            try:
                self.optimizer.step()
            finally:
                del self.optimizer.found_inf
        elif not bad.item():
            self.optimizer.step()
        # like `get_scale`, but does not wait for the device
        counts = self.scaler.scale(self.one) <= HEALTHY_SCALE
        skipped, in_row, latest = self.counts
        self.counts = torch.stack([skipped + bad, torch.where(bad, in_row + counts, 0),
                                   torch.where(bad, iter_num, latest)])
        self.finite_loss = torch.where(bad, self.finite_loss, loss)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def read(self) -> Updates:
        """Return all counts so far, waiting for the device."""
        skipped, in_row, latest = self.counts.tolist()
        new, self.reported = skipped - self.reported, skipped
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else None
        return Updates(skipped, new, latest, in_row, self.norm.item(), scale,
                       self.finite_loss.item())


def broken(updates: Updates, iter_num: int, loss: float, lr: float, grad_clip: float,
           max_skipped: int, saved) -> str:
    """Return the error message of a failed run. saved: path of its checkpoint, or None."""
    what = f'loss is {loss}'
    if math.isfinite(loss):
        what = f'gradient norm is {updates.grad_norm} (loss {loss:.4f})'
    scale = '' if updates.loss_scale is None else f', loss scale {updates.loss_scale:g}'
    last = f'last finite loss {updates.finite_loss:.4f}'
    if math.isnan(updates.finite_loss):
        last = 'no loss was finite yet'
    state = f'{saved} has the last saved state' if saved else 'nothing has been saved yet'
    clip = f'grad_clip below {grad_clip:g}' if grad_clip else 'grad_clip=1 (it is off)'
    return (f'iteration {iter_num}: the {what}, and {updates.in_row} iterations in a row were '
            f'skipped for such reasons (max_skipped={max_skipped}); learning rate {lr:g}{scale}, '
            f'{last}. They left the weights as they were; {state}. Try a lower learning_rate, '
            f'a longer warmup_iters, {clip}, dtype=bfloat16 or float32')
