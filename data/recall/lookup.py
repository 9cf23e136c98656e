"""Looking up facts by content: multi-query associative recall (Arora et al. 2023, "Zoology")."""
from dataclasses import dataclass

import numpy as np

from config.errors import UserError, at_least
from data.recall.lags import IGNORE

BLANK = 0    # id of the filler


@dataclass(frozen=True)
class LookupTask:
    """Facts (a key, its value), a gap, then each key again, in another order, with its value.

        x    k3 v7 k1 v2 . . . . . . k1 v2 k3 v7 .          .  is BLANK
        y    v7 k1 v2 .  . . . . . . v2 k3 v7 .             after a key of the second half, y is the
                                                            answer; `batch` gives its distance

    A key does not say where its fact is, so the model must search what it remembers. No answer is
    closer than `gap` + 2 positions to its fact; a gap of at least n_local * (window_size - 1) puts
    all of them beyond the reach of local layers. Every token is a target, blanks excepted.

    Ids: BLANK, then n_keys keys, then n_values values. Each sequence has one of the numbers of
    `pairs`. `sequences` > 0: training repeats a fixed set of that size, which makes the ability
    emerge much sooner ("Emergence and effectiveness of repetition", Charton & Kempe 2025, arXiv
    2505.17863). Raises UserError for invalid settings.
    """

    block_size: int               # T, positions in a sequence
    pairs: tuple[int, ...]        # numbers of facts
    gap: int = 16                 # blanks between facts and questions
    n_keys: int = 128
    n_values: int = 128
    sequences: int = 12_800

    @property
    def vocab_size(self) -> int:
        return 1 + self.n_keys + self.n_values

    @property
    def shares(self) -> np.ndarray:
        """The probability of each number of pairs: inverse to it, so that all are asked about
        equally often (the ability emerges on few facts first)."""
        inverse = 1 / np.array(self.pairs)
        return inverse / inverse.sum()

    def __post_init__(self) -> None:
        at_least(self, n_keys=1, n_values=2, gap=0, sequences=0)
        if not self.pairs or min(self.pairs) < 1 or len(set(self.pairs)) < len(self.pairs):
            raise UserError(f'lookup: pairs={self.pairs}; needed are one or more different '
                            'numbers, each 1 or more')
        most = max(self.pairs)
        if most > self.n_keys:
            raise UserError(f'lookup: {most} pairs need as many keys, and n_keys={self.n_keys}')
        if 4 * most + self.gap > self.block_size + 1:
            raise UserError(f'lookup: {most} pairs twice and gap={self.gap} do not fit into '
                            f'block_size={self.block_size}')

    def batch(self, rng: np.random.Generator, batch_size: int,
              n_pairs: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw `batch_size` sequences of `n_pairs` facts, or mixed numbers (0): x, y and distance,
        each (B, T) int64. distance: from a question to its fact's key; 0 = not a question."""
        B, T = batch_size, self.block_size
        whole, back = np.zeros((B, T + 1), np.int64), np.zeros((B, T), np.int64)
        numbers = np.full(B, n_pairs) if n_pairs else rng.choice(self.pairs, B, p=self.shares)
        for row, n in enumerate(numbers):
            keys = 1 + rng.permutation(self.n_keys)[:n]
            values = 1 + self.n_keys + rng.integers(self.n_values, size=n)
            order, start = rng.permutation(n), 2 * n + self.gap
            facts = np.stack([keys, values], axis=1)                  # (n, 2)
            whole[row, :2 * n] = facts.ravel()
            whole[row, start:start + 2 * n] = facts[order].ravel()
            asked = start + 2 * np.arange(n)
            back[row, asked] = asked - 2 * order
        x, y = whole[:, :-1], whole[:, 1:].copy()
        y[y == BLANK] = IGNORE
        return x, y, back
