"""Orders in which to train on a data set's windows; none of them stores a list of windows.

    'random'      drawn with replacement from a generator, as nanoGPT does
    'sequential'  one after another, then again from the beginning
    'shuffled'    each once per epoch, in a different order in every epoch
"""
import numpy as np
import torch

from config.errors import UserError

ORDERS = ('random', 'sequential', 'shuffled')
ROUNDS = 4


class RandomOrder:
    """Starts sampled from [0, high) by a generator, whose state is the position in the order."""

    def __init__(self, high: int, generator: torch.Generator):
        self.high, self.generator = high, generator

    state = property(lambda self: self.generator.get_state(),
                     lambda self, state: self.generator.set_state(state))

    def draw(self, n: int) -> torch.Tensor:
        """(n,) int64, the first tokens of the next n windows."""
        return torch.randint(self.high, (n,), generator=self.generator)


class EpochOrder:
    """Adjacent windows of `size` tokens, each once per epoch; seed: None = sequential.

    The state is the number of windows drawn and their size: with a different size, the order
    continues after the same number of tokens.
    """

    def __init__(self, n_tokens: int, size: int, seed: int | None):
        self.n = (n_tokens - 1) // size  # targets are one token later
        self.size, self.seed = size, seed
        self.drawn = 0

    @property
    def state(self) -> torch.Tensor:
        return torch.tensor([self.drawn, self.size])

    @state.setter
    def state(self, state: torch.Tensor):
        if state.shape != (2,) or state.dtype != torch.int64 or state[0] < 0 or state[1] < 1:
            raise ValueError('it is no number of windows and their size: '
                             'the run was in random order (data_order)')
        self.drawn = int(state[0]) * int(state[1]) // self.size

    def draw(self, n: int) -> torch.Tensor:
        """(n,) int64, the first tokens of the next n windows."""
        index = np.arange(self.drawn, self.drawn + n, dtype=np.uint64)
        self.drawn += n
        epochs, places = index // self.n, index % self.n
        if self.seed is not None:
            for epoch in np.unique(epochs):
                now = epochs == epoch
                places[now] = permuted(places[now], self.n, self.seed, int(epoch))
        return torch.from_numpy((places * self.size).astype(np.int64))


def permuted(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Map `index`, (k,) uint64 below n, by a permutation of range(n) given by seed and epoch.

    A Feistel network over the next power of four, applied until the result is below n (Black and
    Rogaway 2002, "Ciphers with arbitrary finite domains"), which needs no table.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask, shift = np.uint64(2 ** half - 1), np.uint64(half)
    base = seed * 0x9E3779B97F4A7C15 + epoch * 0xD1342543DE82EF95
    keys = [_mixed(np.uint64((base + k) % 2 ** 64)) for k in range(ROUNDS)]
    found, open_ = index.astype(np.uint64).copy(), np.ones(len(index), bool)
    while open_.any():
        left, right = found[open_] >> shift, found[open_] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        found[open_] = left << shift | right
        open_ = found >= n
    return found


def _mixed(x):
    """Return splitmix64's output function of x (Steele, Lea and Flood 2014)."""
    with np.errstate(over='ignore'):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def make_order(name: str, n_tokens: int, size: int, generator: torch.Generator, seed: int):
    """Make an order of windows of `size` tokens plus a target. UserError if `name` is unknown."""
    if name not in ORDERS:
        raise UserError(f"data_order={name!r}: allowed are {', '.join(map(repr, ORDERS))}")
    if name == 'random':
        return RandomOrder(n_tokens - size, generator)
    return EpochOrder(n_tokens, size, seed if name == 'shuffled' else None)
