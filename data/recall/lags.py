"""Copying from marked distances: the task of the recall ladders, quickly learned where the answer can be seen at all."""
from dataclasses import dataclass

import numpy as np

from config.errors import UserError
from data.recall.task import IGNORE


@dataclass(frozen=True)
class MarkedCopyTask:
    """Sequences with a marker and a string of distinct tokens, and both again later; the marker says how much later.

        x         . . M a b c d . . . . . . . M a b c d .       M one of the markers, . filler
        y         - - - - - - - - - - - - - - a b c d - -       - is -1: not scored
        distance                                ^ from the query to the token that answers it, the same for the whole string

    One marker for each distance: what is asked is whether the model can see that far, not whether it can search (plain
    attention learns this task in a few hundred steps, and searching over random distances not in thousands, at this size).
    Ids: n_tokens string tokens, a marker for each of `distances`, then n_filler fillers.
    Raises UserError for settings that leave no room.
    """

    block_size: int               # T, positions in a sequence
    distances: tuple[int, ...]    # positions from a query back to its answer
    n_tokens: int = 64            # alphabet of the strings
    length: int = 40              # tokens in a string, fewer where the distance is shorter
    n_filler: int = 16            # alphabet of filler

    @property
    def vocab_size(self) -> int:
        """String tokens, markers and fillers."""
        return self.n_tokens + len(self.distances) + self.n_filler

    def __post_init__(self) -> None:
        for name in ('block_size', 'n_tokens', 'length', 'n_filler'):
            if getattr(self, name) < 1:
                raise UserError(f'recall: {name}={getattr(self, name)}; allowed is 1 or more')
        if not self.distances or min(self.distances) < 1 or len(set(self.distances)) < len(self.distances):
            raise UserError(f'recall: distances={self.distances}; needed are one or more different ones, each 1 or more')
        if self.length > self.n_tokens:
            raise UserError(f'recall: length={self.length} needs as many different tokens; n_tokens={self.n_tokens}')
        for distance in self.distances:
            if self._room(distance) < 1:
                raise UserError(f'recall: a string of {self._length(distance)} tokens and distance {distance} do not fit into '
                                f'block_size={self.block_size}')

    def _length(self, distance: int) -> int:
        return min(self.length, distance)  # the second marker stands behind the first string

    def _room(self, distance: int) -> int:
        """Positions at which the first marker may stand."""
        return self.block_size - distance - 1 - self._length(distance)

    def batch(self, rng: np.random.Generator, batch_size: int, distance: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw `batch_size` sequences: x, y, distance, each int64 of shape (B, T). distance: of all rows; 0 = any."""
        B, T = batch_size, self.block_size
        known = np.array(self.distances)
        which = rng.integers(len(known), size=B) if not distance else np.full(B, self.distances.index(distance))
        distances = known[which]
        lengths = np.minimum(self.length, distances)
        first = (rng.random(B) * (T - distances - 1 - lengths)).astype(np.int64)
        strings = rng.random((B, self.n_tokens)).argsort(axis=1)[:, :self.length]                      # distinct in a row
        tokens = self.n_tokens + len(known) + rng.integers(self.n_filler, size=(B, T + 1))              # T+1: a last answer
        y = np.full((B, T), IGNORE, dtype=np.int64)
        back = np.zeros((B, T), dtype=np.int64)
        row, offset = np.nonzero(np.arange(self.length) < lengths[:, None])  # of every token of every string
        for marker in (first, first + distances + 1):
            tokens[np.arange(B), marker] = self.n_tokens + which
            tokens[row, marker[row] + 1 + offset] = strings[row, offset]
        asked = (first + distances + 1)[row] + offset  # the position before each copied token
        y[row, asked], back[row, asked] = strings[row, offset], distances[row]
        return tokens[:, :T].astype(np.int64), y, back


def read_task(text: str, block_size: int) -> MarkedCopyTask:
    """'distances=7,30,100 length=40' -> the task, for sequences of `block_size`.

    Raises:
        UserError: an unknown name, or something that is no number.
    """
    given = {}
    for word in text.split():
        name, _, value = word.partition('=')
        if name not in ('distances', 'n_tokens', 'length', 'n_filler'):
            raise UserError(f"recall_task={text!r}: {word!r} is none of distances=7,30 n_tokens=64 length=40 n_filler=16")
        try:
            numbers = tuple(int(piece) for piece in value.split(','))
        except ValueError:
            raise UserError(f'recall_task={text!r}: {word!r}: {value!r} is no whole number') from None
        given[name] = numbers if name == 'distances' else numbers[0]
    if 'distances' not in given:
        raise UserError(f"recall_task={text!r}: needs distances, as 'distances=7,30,100'")
    return MarkedCopyTask(block_size, **given)
