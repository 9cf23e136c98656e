"""AdamW in nanoGPT's two groups, and the learning-rate schedule."""
import inspect
import math

import torch


def configure_optimizers(model, weight_decay, learning_rate, betas, device_type):
    """AdamW: parameters of two or more dimensions decay, vectors (biases, norm gains) do not. Fused where torch can."""
    params = [p for p in model.parameters() if p.requires_grad]
    decay = [p for p in params if p.dim() >= 2]
    no_decay = [p for p in params if p.dim() < 2]
    groups = [{'params': decay, 'weight_decay': weight_decay}, {'params': no_decay, 'weight_decay': 0.0}]
    print(f'num decayed parameter tensors: {len(decay)}, with {sum(p.numel() for p in decay):,} parameters')
    print(f'num non-decayed parameter tensors: {len(no_decay)}, with {sum(p.numel() for p in no_decay):,} parameters')
    fused = 'fused' in inspect.signature(torch.optim.AdamW).parameters and device_type in ('cuda', 'cpu')
    print(f'using fused AdamW: {fused}')
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, **({'fused': True} if fused else {}))


def learning_rate_at(it: int, s) -> float:
    """Linear warm-up, cosine decay to min_lr at lr_decay_iters, then min_lr. `s` has train.py's keys."""
    if not s.decay_lr:
        return s.learning_rate
    if it < s.warmup_iters:
        return s.learning_rate * (it + 1) / (s.warmup_iters + 1)
    if it >= s.lr_decay_iters:
        return s.min_lr
    ratio = (it - s.warmup_iters) / (s.lr_decay_iters - s.warmup_iters)
    return s.min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (s.learning_rate - s.min_lr)
