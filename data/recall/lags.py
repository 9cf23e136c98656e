"""Recall of tokens at marked distances, the task used in the recall ladders.

Models with RoPE and qk_norm learn it quickly wherever attention reaches the answer.
"""
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from config.errors import UserError, at_least

IGNORE = -1  # nanoGPT's ignore_index
QUERIES = 1 / 3  # fraction of positions that are queries; the others are tokens


@dataclass(frozen=True)
class LagTask:
    """Random tokens and queries: markers that tell how many positions back the answer is.

        x         a b c d e P f g Q h        P asks for the token 3 back, Q for the one 7 back
        y         - - - - - c - - b -        - is -1: not scored
        distance            3     7

    The task tests whether the model can attend that far, not whether it can search: the marker
    determines the position of the answer, so one attention head per distance is enough.
    Ids: n_tokens tokens, then a marker per distance. Raises UserError for invalid settings.
    """

    block_size: int               # T, positions in a sequence
    distances: tuple[int, ...]    # positions from a query back to its answer
    n_tokens: int = 64
    sequences: ClassVar[int] = 0  # new ones in every batch

    @property
    def vocab_size(self) -> int:
        return self.n_tokens + len(self.distances)

    def __post_init__(self) -> None:
        at_least(self, block_size=1, n_tokens=1)
        repeated = len(set(self.distances)) < len(self.distances)
        if not self.distances or min(self.distances) < 1 or repeated:
            raise UserError(f'recall: distances={self.distances}; '
                            'needed are one or more different ones, each 1 or more')
        if max(self.distances) >= self.block_size:
            raise UserError(f'recall: distance {max(self.distances)} does not fit into '
                            f'block_size={self.block_size}')

    def batch(self, rng: np.random.Generator, batch_size: int,
              distance: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw `batch_size` sequences, with queries of one `distance`, or mixed ones (0): x, y,
        distance (0 = no query), each (B, T) int64."""
        B, T, known = batch_size, self.block_size, np.array(self.distances)
        asked = rng.random((B, T)) < QUERIES
        source = np.arange(T)[:, None] - known              # (T, n distances)
        found = (source >= 0) & ~asked[:, source.clip(0)]   # whether a token (not a query) is there
        if distance:
            found &= known == distance
        which = (rng.random(found.shape) * found).argmax(-1)  # one of those, at random
        asked &= found.any(-1)
        x = rng.integers(self.n_tokens, size=(B, T), dtype=np.int64)
        y, back = np.full_like(x, IGNORE), np.zeros_like(x)
        row, at = np.nonzero(asked)
        back[row, at] = known[which[row, at]]
        y[row, at] = x[row, at - back[row, at]]
        x[row, at] = self.n_tokens + which[row, at]
        return x, y, back
