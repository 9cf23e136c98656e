"""Optimizers, in nanoGPT's two groups (matrices decay, vectors do not), and the learning-rate schedules.

    'adamw'      AdamW (Loshchilov & Hutter 2019), fused where torch can
    'muon'       Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for embeddings and vectors
    'adamw8bit'  AdamW whose averages are kept in 8 bits (Dettmers et al. 2022), torchao's

With `offload_optimizer` AdamW's state and steps are in host memory (`training.host_optimizer`).

Muon replaces a matrix's averaged gradient by the nearest orthogonal matrix. Its steps are scaled to the size of AdamW's (Liu et
al. 2025, "Muon is scalable for LLM training"): so both take one learning rate, and one that suits AdamW is a good first try.
"""
import inspect
import math

import torch

from config.errors import UserError
from training.host_optimizer import HostAdamW

ON_HOST = 'adamw on the host'  # what `state_nbytes` knows it by


def configure_optimizers(model, weight_decay, learning_rate, betas, device_type):
    """AdamW: parameters of two or more dimensions decay, vectors (biases, norm gains) do not. Fused where torch can."""
    decay, no_decay = _by_dimension(model)
    _say(decay, no_decay)
    fused = 'fused' in inspect.signature(torch.optim.AdamW).parameters and device_type in ('cuda', 'cpu')
    print(f'using fused AdamW: {fused}')
    return torch.optim.AdamW(_groups(decay, no_decay, weight_decay), lr=learning_rate, betas=betas,
                             **({'fused': True} if fused else {}))


def check_optimizer(s) -> None:
    """Raises UserError: torchao is missing, or `offload_optimizer` is set with another than AdamW."""
    if s.offload_optimizer and s.optimizer != 'adamw':
        raise UserError(f"offload_optimizer=True goes with optimizer='adamw', not {s.optimizer!r}")
    if s.optimizer == 'adamw8bit':
        _adamw8bit()


def make_optimizer(model, s, device_type: str) -> torch.optim.Optimizer:
    """The one that the settings `s` (train.py's) name.

    Raises:
        UserError: as `check_optimizer`.
    """
    check_optimizer(s)
    betas = s.beta1, s.beta2
    if s.optimizer == 'adamw' and not s.offload_optimizer:
        return model.configure_optimizers(s.weight_decay, s.learning_rate, betas, device_type)
    decay, no_decay = _by_dimension(model)
    _say(decay, no_decay)
    if s.offload_optimizer:
        print('using AdamW on the host')
        return HostAdamW(_groups(decay, no_decay, s.weight_decay), lr=s.learning_rate, betas=betas)
    if s.optimizer == 'adamw8bit':
        return _adamw8bit()(_groups(decay, no_decay, s.weight_decay), lr=s.learning_rate, betas=betas)
    blocks = {id(p) for p in model.transformer.h.parameters()}
    matrices = [p for p in decay if id(p) in blocks]
    print(f'using Muon for {len(matrices)} matrices of blocks, with {sum(p.numel() for p in matrices):,} parameters, and AdamW '
          'for the others')
    others = [p for p in decay if id(p) not in blocks]
    muon = torch.optim.Muon(matrices, lr=s.learning_rate, weight_decay=s.weight_decay, momentum=s.muon_momentum,
                            adjust_lr_fn='match_rms_adamw')
    return Together(muon, torch.optim.AdamW(_groups(others, no_decay, s.weight_decay), lr=s.learning_rate, betas=betas))


def _by_dimension(model):
    params = [p for p in model.parameters() if p.requires_grad]
    return [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]


def _say(decay, no_decay):
    print(f'num decayed parameter tensors: {len(decay)}, with {sum(p.numel() for p in decay):,} parameters')
    print(f'num non-decayed parameter tensors: {len(no_decay)}, with {sum(p.numel() for p in no_decay):,} parameters')


def _groups(decay, no_decay, weight_decay):
    return [{'params': decay, 'weight_decay': weight_decay}, {'params': no_decay, 'weight_decay': 0.0}]


def _adamw8bit():
    try:
        from torchao.optim import AdamW8bit
    except ImportError as e:
        raise UserError("optimizer='adamw8bit' needs the torchao package: pip install -e '.[int8]'") from e
    return AdamW8bit


class Together(torch.optim.Optimizer):
    """Several optimizers, each for parameters of its own, as one: its groups are theirs in their order, and so is its state."""

    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts, self.sizes = parts, [len(part.param_groups) for part in parts]
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def __setstate__(self, state):
        super().__setstate__(state)
        self._share()  # `load_state_dict` makes new groups and another state

    def _share(self):
        start = 0
        for part, n in zip(self.parts, self.sizes):
            part.param_groups, part.state = self.param_groups[start:start + n], self.state
            start += n

    def step(self, closure=None):
        """One step of each. closure: not supported."""
        for part in self.parts:
            part.step()


def state_name(s) -> str:
    """What `state_nbytes` is to be asked about, by train.py's settings."""
    return ON_HOST if s.offload_optimizer else s.optimizer


def state_nbytes(model, name: str) -> int:
    """Bytes of the device that the state of this optimizer will have after its first step: two averages and a step count, or
    one average."""
    if name == ON_HOST:
        return 0
    blocks = {id(p) for p in model.transformer.h.parameters()}
    total = 0
    for p in (p for p in model.parameters() if p.requires_grad):
        if name == 'adamw8bit' and p.numel() >= 4096 and p.numel() % 256 == 0:
            total += 2 * (p.numel() + 4 * p.numel() // 256 + 4 * 256) + 4  # codes, a scale for 256 of them, their meaning
        elif name == 'muon' and p.dim() >= 2 and id(p) in blocks:
            total += p.nbytes
        else:
            total += 2 * p.nbytes + 4
    return total


def set_learning_rate(optimizer, lr: float) -> None:
    """For all groups."""
    for group in optimizer.param_groups:
        if torch.is_tensor(group['lr']):  # torchao's: its step is compiled, and would be anew for another number
            group['lr'].fill_(lr)
        else:
            group['lr'] = lr


def learning_rate_at(it: int, s) -> float:
    """Linear warm-up; then, by `lr_schedule`, cosine decay to min_lr at lr_decay_iters, or the learning rate as it is until
    cooldown_iters before that, and from there in a line to min_lr (warm-up, stable, decay; Hu et al. 2024, MiniCPM). `s` has
    train.py's keys."""
    if not s.decay_lr:
        return s.learning_rate
    if it < s.warmup_iters:
        return s.learning_rate * (it + 1) / (s.warmup_iters + 1)
    if it >= s.lr_decay_iters:
        return s.min_lr
    if s.lr_schedule == 'wsd':
        left = (s.lr_decay_iters - it) / cooldown(s)
        return s.min_lr + min(1.0, left) * (s.learning_rate - s.min_lr)
    ratio = (it - s.warmup_iters) / (s.lr_decay_iters - s.warmup_iters)
    return s.min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (s.learning_rate - s.min_lr)


def cooldown(s) -> int:
    """Iterations of the last part of 'wsd': cooldown_iters, or a fifth of lr_decay_iters."""
    return s.cooldown_iters or max(1, s.lr_decay_iters // 5)
