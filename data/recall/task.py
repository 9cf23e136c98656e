"""Make batches of associative recall: how far back can a model fetch a value, to the token?

    position  0 1 2 3 4 5 6 7 8 9 ...                     K key, V value, . filler
    x         . . K V . . K'V'. . . . . . . K V . . .     the second K is the query, its V the answer
    y         - - - - - - - - - - - - - - - V - - - -     - is -1: not scored
    distance                                ^ from the query to the first V, in positions
"""

from dataclasses import dataclass

import numpy as np

from config.errors import UserError

IGNORE = -1  # nanoGPT's ignore_index
ROUNDS = 100  # redraws of the rows whose tokens found no room


@dataclass(frozen=True)
class RecallTask:
    """Sequences of (key, value) pairs, later queried by key, in random filler.

    Ids: keys 0..n_keys-1, then n_values values, then n_filler fillers. Pairs lie in the first
    block_size - max_distance positions, so that each can be recalled from any allowed distance.
    A key is queried at most once: a second query would find the first one's answer, at a shorter distance.
    Raises UserError for settings that leave no room.
    """

    block_size: int  # T, positions in a sequence
    n_keys: int  # alphabet of keys
    n_values: int  # alphabet of values
    n_pairs: int  # pairs in a sequence, of distinct keys
    n_queries: int  # queries in a sequence, of distinct pairs
    min_distance: int  # positions between the value and the query that recalls it, inclusive
    max_distance: int
    n_filler: int = 16  # alphabet of filler

    @property
    def vocab_size(self) -> int:
        """Keys, values and fillers."""
        return self.n_keys + self.n_values + self.n_filler

    @property
    def room(self) -> int:
        """Length of the early part, which holds the pairs."""
        return self.block_size - self.max_distance

    def __post_init__(self) -> None:
        for name in ('block_size', 'n_keys', 'n_pairs', 'n_queries', 'min_distance', 'max_distance', 'n_filler'):
            if getattr(self, name) < 1:
                raise UserError(f'recall: {name}={getattr(self, name)}; allowed is 1 or more')
        if self.n_values < 2:
            raise UserError(f'recall: n_values={self.n_values}; allowed is 2 or more (one value needs no recall)')
        if self.n_pairs > self.n_keys:
            raise UserError(f'recall: n_pairs={self.n_pairs} needs as many keys; n_keys={self.n_keys}')
        if self.n_queries > self.n_pairs:
            raise UserError(f'recall: n_queries={self.n_queries}; allowed is at most n_pairs={self.n_pairs}')
        if self.min_distance > self.max_distance:
            raise UserError(f'recall: min_distance={self.min_distance} exceeds max_distance={self.max_distance}')
        if self.room < 2 * self.n_pairs:
            raise UserError(f'recall: {self.n_pairs} pairs need {2 * self.n_pairs} positions before the last '
                            f'max_distance={self.max_distance}, but block_size={self.block_size} leaves {self.room}')
        self._place(np.random.default_rng(0), 1)  # too crowded settings fail here, not in the midst of training

    def batch(self, rng: np.random.Generator, batch_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw `batch_size` sequences: x, y, distance, each int64 of shape (B, T) with T = block_size.

        y is the value at query positions and -1 elsewhere; distance is 0 where y is -1.
        """
        B, T, P, Q = batch_size, self.block_size, self.n_pairs, self.n_queries
        pair_at, distances = self._place(rng, B)  # (B, P), (B, Q)
        query_at = pair_at[:, :Q] + 1 + distances  # (B, Q)
        keys = rng.random((B, self.n_keys)).argsort(axis=1)[:, :P]  # (B, P), distinct in a row
        values = self.n_keys + rng.integers(self.n_values, size=(B, P))
        row = np.arange(B)[:, None]
        tokens = self.n_keys + self.n_values + rng.integers(self.n_filler, size=(B, T + 1))  # T+1: a last answer
        tokens[row, pair_at], tokens[row, pair_at + 1] = keys, values
        tokens[row, query_at], tokens[row, query_at + 1] = keys[:, :Q], values[:, :Q]
        y = np.full((B, T), IGNORE, dtype=np.int64)
        distance = np.zeros((B, T), dtype=np.int64)
        y[row, query_at], distance[row, query_at] = values[:, :Q], distances
        return tokens[:, :T].astype(np.int64), y, distance

    def _place(self, rng: np.random.Generator, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions of the pairs (B, P), the queried ones first, and the queries' distances (B, Q)."""
        pair_at = np.zeros((batch_size, self.n_pairs), dtype=np.int64)
        distances = np.zeros((batch_size, self.n_queries), dtype=np.int64)
        todo = np.arange(batch_size)
        for _ in range(ROUNDS):
            pair_at[todo], distances[todo], placed = self._try_place(rng, len(todo))
            todo = todo[~placed]
            if len(todo) == 0:
                return pair_at, distances
        raise UserError(f'recall: n_pairs={self.n_pairs} and n_queries={self.n_queries} are too crowded for '
                        f'{self.room} early positions of block_size={self.block_size}; use fewer or a larger block')

    def _try_place(self, rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        # Distances are drawn first and kept, positions chosen to suit them: otherwise short distances, whose queries
        # fall among the pairs, would find their place taken more often and become rare.
        distances = rng.integers(self.min_distance, self.max_distance + 1, size=(rows, self.n_queries))
        free = np.ones((rows, self.block_size + 1), dtype=bool)
        pair_at = np.zeros((rows, self.n_pairs), dtype=np.int64)
        placed = np.ones(rows, dtype=bool)
        row = np.arange(rows)
        starts = np.arange(self.room - 1)
        for p in range(self.n_pairs):
            two_free = free[:, :-1] & free[:, 1:]  # (rows, T): room for two tokens from here
            fits = two_free[:, : self.room - 1]  # (rows, room-1)
            if p < self.n_queries:
                query_starts = starts + 1 + distances[:, p, None]
                # the query must not sit on its own pair either: distance >= 1 sees to that
                fits = fits & two_free[row[:, None], query_starts]
            at = np.where(fits, rng.random(fits.shape), -1.0).argmax(axis=1)
            placed &= fits[row, at]
            pair_at[:, p] = at
            free[row, at] = free[row, at + 1] = False
            if p < self.n_queries:
                query = at + 1 + distances[:, p]
                free[row, query] = free[row, query + 1] = False
        return pair_at, distances, placed


@dataclass(frozen=True)
class CopyTask:
    """Sequences with a marker and a string of `length` distinct tokens early on, and both again `distance` later.

        x         . . M a b c d . . . . . . . M a b c d .       M marker, . filler
        y         - - - - - - - - - - - - - - a b c d - -       - is -1: not scored
        distance  from the token to its first occurrence, the same for the whole string

    Ids: n_tokens string tokens, the marker, then n_filler fillers. Every token of the second string is scored, which
    gives a far denser signal than `RecallTask` and so is learned in fewer steps.
    Raises UserError for settings that leave no room.
    """

    block_size: int  # T, positions in a sequence
    n_tokens: int  # alphabet of the string
    length: int  # tokens in the string
    min_distance: int
    max_distance: int
    n_filler: int = 16  # alphabet of filler

    @property
    def vocab_size(self) -> int:
        """String tokens, the marker and fillers."""
        return self.n_tokens + 1 + self.n_filler

    @property
    def room(self) -> int:
        """Positions at which the first marker may stand."""
        return self.block_size - self.max_distance - self.length

    def __post_init__(self) -> None:
        for name in ('block_size', 'n_tokens', 'length', 'min_distance', 'max_distance', 'n_filler'):
            if getattr(self, name) < 1:
                raise UserError(f'copy: {name}={getattr(self, name)}; allowed is 1 or more')
        if self.length > self.n_tokens:
            raise UserError(f'copy: length={self.length} needs as many different tokens; n_tokens={self.n_tokens}')
        if not self.length < self.min_distance <= self.max_distance:
            raise UserError(f'copy: min_distance={self.min_distance} must exceed length={self.length} and not '
                            f'max_distance={self.max_distance}')
        if self.room < 1:
            raise UserError(f'copy: max_distance={self.max_distance} and length={self.length} do not fit into '
                            f'block_size={self.block_size}')

    def batch(self, rng: np.random.Generator, batch_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw `batch_size` sequences: x, y, distance, each int64 of shape (B, T), as in `RecallTask.batch`."""
        B, T, n = batch_size, self.block_size, self.length
        distances = rng.integers(self.min_distance, self.max_distance + 1, size=(B, 1))
        first = rng.integers(self.room, size=(B, 1))
        string = rng.random((B, self.n_tokens)).argsort(axis=1)[:, :n]  # (B, n), distinct in a row
        row, offsets = np.arange(B)[:, None], np.arange(n)
        tokens = self.n_tokens + 1 + rng.integers(self.n_filler, size=(B, T + 1))  # T+1: a last answer
        for marker in (first, first + distances):
            tokens[row, marker], tokens[row, marker + 1 + offsets] = self.n_tokens, string
        y = np.full((B, T), IGNORE, dtype=np.int64)
        distance = np.zeros((B, T), dtype=np.int64)
        asked = first + distances + offsets  # the position before each copied token
        # from the asking position to the first occurrence of its answer
        y[row, asked], distance[row, asked] = string, distances - 1
        return tokens[:, :T].astype(np.int64), y, distance
