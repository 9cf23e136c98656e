"""Optimizers, in nanoGPT's two groups (matrices decay, vectors do not), and the learning rate.

    'adamw'  AdamW (Loshchilov & Hutter 2019), fused where torch supports it
    'muon'   Muon (Jordan et al. 2024) for the matrices of the blocks (not the tables of embeddings
             there), AdamW for the rest

Muon's steps are scaled to the size of AdamW's (Liu et al. 2025, "Muon is scalable for LLM
training"), so that both use the same learning rate.
"""
import math

import torch

from training.device import multiplies_bfloat16
from training.parallel.fsdp import is_sharded, like, own_nbytes

TOGETHER = 2 ** 21  # numbers in the matrices that Muon orthogonalizes together


def configure_optimizers(model, weight_decay, learning_rate, betas, device_type):
    """Make an AdamW that decays parameters with two or more dimensions, but no vectors."""
    groups = _groups(model, weight_decay)
    fused = device_type in ('cuda', 'cpu')
    print(f'using fused AdamW: {fused}')
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused or None)


def make_optimizer(model, s, device_type: str) -> torch.optim.Optimizer:
    """Make the optimizer given by train.py's settings `s`."""
    betas = s.beta1, s.beta2
    if s.optimizer == 'adamw':
        return model.configure_optimizers(s.weight_decay, s.learning_rate, betas, device_type)
    groups = _groups(model, s.weight_decay)
    for_muon = _orthogonalized_ids(model)
    matrices = [p for p in groups[0]['params'] if id(p) in for_muon]
    groups[0]['params'] = [p for p in groups[0]['params'] if id(p) not in for_muon]
    print(f'using Muon for {len(matrices)} matrices of blocks, with '
          f'{sum(p.numel() for p in matrices):,} parameters, and AdamW for the others')
    # torch's Muon takes much of a small model's step on a CPU, and most of it without instructions
    # for bfloat16
    batched = s.dtype == 'auto' and device_type == 'cpu' and not is_sharded(matrices[0])
    kind = BatchedMuon if batched else torch.optim.Muon
    muon = kind(matrices, lr=s.learning_rate, weight_decay=s.weight_decay,
                momentum=s.muon_momentum, adjust_lr_fn='match_rms_adamw')
    adamw = torch.optim.AdamW(groups, lr=s.learning_rate, betas=betas, fused=batched or None)
    return CombinedOptimizer(muon, adamw)


def _orthogonalized_ids(model) -> set[int]:
    """The ids of the parameters for Muon. The rows of an embedding are vectors of their own."""
    blocks = model.transformer.h
    tables = {id(m.weight) for m in blocks.modules() if isinstance(m, torch.nn.Embedding)}
    return {id(p) for p in blocks.parameters() if p.dim() == 2} - tables


def _groups(model, weight_decay):
    """Return nanoGPT's parameter groups, printing its messages."""
    params = [p for p in model.parameters() if p.requires_grad]
    decay = [p for p in params if p.dim() >= 2]
    no_decay = [p for p in params if p.dim() < 2]
    for name, group in (('decayed', decay), ('non-decayed', no_decay)):
        print(f'num {name} parameter tensors: {len(group)}, with '
              f'{sum(p.numel() for p in group):,} parameters')
    return [{'params': decay, 'weight_decay': weight_decay},
            {'params': no_decay, 'weight_decay': 0.0}]


class BatchedMuon(torch.optim.Muon):
    """torch's Muon with `match_rms_adamw`, for CPUs: matrices of one shape are orthogonalized
    together, in bfloat16 if the processor has instructions for it, otherwise in float32."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            shapes = {}
            for p in group['params']:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                n = max(1, TOGETHER // shape.numel())
                for start in range(0, len(params), n):
                    self._step(params[start:start + n], group)

    def _step(self, params, group):
        momentum, updates = group['momentum'], []
        for p in params:
            buffer = self.state[p].setdefault('momentum_buffer', torch.zeros_like(p.grad))
            buffer.lerp_(p.grad, 1 - momentum)
            updates.append(p.grad.lerp(buffer, momentum))
        how = group['ns_coefficients'], group['ns_steps'], group['eps']
        updates = orthogonalized(torch.stack(updates), *how, bfloat16=multiplies_bfloat16())
        rate = group['lr'] * 0.2 * math.sqrt(max(params[0].shape))
        for p, update in zip(params, updates):
            p.mul_(1 - group['lr'] * group['weight_decay']).add_(update, alpha=-rate)


def orthogonalized(x, coefficients, steps: int, eps: float, bfloat16=False) -> torch.Tensor:
    """Newton-Schulz iterations (Jordan et al. 2024) on matrices x (n, r, c), float32.

    An iteration multiplies x by p = a + b g + c g^2, where g = x x^T. In float32, x is needed only
    at the start and at the end: between them the iterations multiply g by p twice, and their
    product q by p, which are matrices as small as the shorter side. In bfloat16 g would lose too
    much, and each iteration computes it from x again.
    """
    if x.size(1) > x.size(2):
        return orthogonalized(x.mT, coefficients, steps, eps, bfloat16).mT
    a, b, c = coefficients
    x = x / x.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None]
    if bfloat16:
        x = x.bfloat16()
        for _ in range(steps):
            g = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(g, g, g, beta=b, alpha=c), x, beta=a)
        return x.float()
    g, eye = x @ x.mT, torch.eye(x.size(1))
    q = eye.expand_as(g)
    for step in range(steps):
        p = torch.baddbmm(g, g, g, beta=b, alpha=c).add_(eye, alpha=a)
        q = p @ q if step else p
        if step < steps - 1:
            g = p @ g @ p
    return q @ x


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers of different parameters as one, with the groups and the state of all."""

    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def __setstate__(self, state):
        super().__setstate__(state)
        self._share()  # `load_state_dict` makes new groups and a new state

    def _share(self):
        start = 0
        for part in self.parts:
            n = len(part.param_groups)
            part.param_groups, part.state = self.param_groups[start:start + n], self.state
            start += n

    def step(self, closure=None):
        """Step each optimizer once. closure: not supported."""
        for part in self.parts:
            part.step()


def load_optimizer(optimizer, state: dict) -> None:
    """`load_state_dict` that checks shapes, and keeps the settings of the groups, such as `fused`,
    since the checkpoint may be of another device. A state from before the first step is ignored."""
    if not state['state']:
        return
    own = [*optimizer.param_groups, *[{}] * len(state['param_groups'])]
    groups = [{**saved, **mine, 'params': saved['params']}
              for saved, mine in zip(state['param_groups'], own)]
    params = [p for group in optimizer.param_groups for p in group['params']]
    values = {i: {name: like(params[i], x) if torch.is_tensor(x) else x for name, x in its.items()}
              for i, its in state['state'].items()}
    optimizer.load_state_dict({'state': values, 'param_groups': groups})
    for p in params:
        for name, x in optimizer.state[p].items():
            if name != 'step' and torch.is_tensor(x) and x.shape != p.shape:
                raise ValueError(f'{name} is {tuple(x.shape)}, its parameter {tuple(p.shape)}')


def state_bytes(model, name: str) -> tuple[int, int, int]:
    """Return the bytes that this process has on its device after the first step: of parameters,
    gradients, and the state of the optimizer of this name."""
    for_muon = _orthogonalized_ids(model)
    parameters = sum(map(own_nbytes, model.parameters()))
    gradients = state = 0
    for p in (p for p in model.parameters() if p.requires_grad):
        n = own_nbytes(p)
        gradients += n
        state += n if name == 'muon' and id(p) in for_muon else 2 * n + 4
    return parameters, gradients, state


def set_learning_rate(optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group['lr'] = lr


def learning_rate_at(it: int, s) -> float:
    """Return the learning rate of iteration `it`: linear warm-up, then cosine decay to min_lr at
    lr_decay_iters, or 'wsd' (warm-up, stable, decay; Hu et al. 2024, MiniCPM), constant until the
    last cooldown_iters of them, which decay linearly."""
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
    """Return the iterations of the 'wsd' decay."""
    return s.cooldown_iters or max(1, s.lr_decay_iters // 5)
