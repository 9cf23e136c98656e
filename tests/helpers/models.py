"""Small random models with attention so sharp that a single wrong key shows, and ways to feed them
tokens through a cache."""
import random

import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lab.conform import random_config, random_model  # noqa: F401

VOCAB = 23
PUBLISHED = dict(layer_pattern='LLLLLG', kv_share='AABBBC', share_global_kv=True, n_kv_head=1,
                 pos_embedding='rope', qk_norm=True)
# one period plus one layer, small enough to run token by token
FULL_STACK = dict(PUBLISHED, n_layer=7, n_head=4, n_embd=24, head_dim=6, window_size=5,
                  block_size=64, vocab_size=VOCAB, rope_theta=100.0)
# the same form with fewer layers, where each takes long
SHORT_STACK = dict(FULL_STACK, n_layer=4, layer_pattern='LLG', kv_share='AAB')


def tokens(batch, length, seed=0):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def full_logits(model, idx):
    return model(idx, all_logits=True)[0]


@torch.no_grad()
def feed(model, cache, idx, chunks):
    """All logits of idx (B, T), which is fed to the cache chunk by chunk."""
    assert sum(chunks) == idx.size(1)
    return torch.cat([model(piece, cache=cache, all_logits=True)[0]
                      for piece in idx.split(list(chunks), dim=1)], dim=1)


def max_gap(a, b):
    assert a.shape == b.shape
    return (a.double() - b.double()).abs().max().item()


class Largest(TorchDispatchMode):
    """`n`: elements of the largest floating-point tensor that an operation returned."""
    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.n = max(self.n, x.numel())
        return out


def configs(windows=(1, 2, 3, 5, 8, 33), **fixed):
    """All kinds of plans, at least one period plus one layer deep."""
    fixed = dict(vocab_size=VOCAB, kv_quant_train='') | fixed
    seeds = st.integers(0, 2 ** 32)
    return seeds.map(lambda seed: random_config(random.Random(seed), windows, **fixed))
