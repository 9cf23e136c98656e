"""Orders in which to train on a data set's windows.

    'random'      drawn with replacement from a generator, as nanoGPT does
    'sequential'  one after another, then again from the beginning
    'shuffled'    each once per epoch, in a different order in every epoch
"""
import functools

import numpy as np
import torch


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
        epochs, places = np.divmod(np.arange(self.drawn, self.drawn + n), self.n)
        self.drawn += n
        if self.seed is not None:
            for epoch in np.unique(epochs):
                now = epochs == epoch
                places[now] = permutation(self.n, self.seed, int(epoch))[places[now]]
        return torch.from_numpy(places * self.size)


@functools.lru_cache(maxsize=1)
def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """(n,) int64, the order of n windows in an epoch: 80 MB for 10 million windows."""
    return np.random.default_rng((seed % 2 ** 64, epoch)).permutation(n)


def make_order(name: str, n_tokens: int, size: int, generator: torch.Generator, seed: int):
    """Make the order `name`, one of the above, of windows of `size` tokens plus a target."""
    if name == 'random':
        return RandomOrder(n_tokens - size, generator)
    return EpochOrder(n_tokens, size, seed if name == 'shuffled' else None)
