"""The synthetic tasks, by the name of their data set: recall of tokens at marked distances, and
looking up facts by content. Each is given by a setting, as recall_task='distances=7,30 n_tokens=32'
or lookup_task='pairs=2,4,8 gap=16'. README.md says why.
"""
import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from common.errors import UserError, at_least

IGNORE = -1  # nanoGPT's ignore_index
QUERIES = 1 / 3  # fraction of positions that are queries, in `LagTask`; the others are tokens
BLANK = 0  # id of the filler of `LookupTask`


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


@dataclass(frozen=True)
class LookupTask:
    """Multi-query associative recall (Arora et al. 2023, "Zoology"): facts (a key, its value), a
    gap, then each key again, in another order, with its value.

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


TASKS = {'recall': LagTask, 'lookup': LookupTask}


def task_of(s) -> LagTask | LookupTask | None:
    """Return the task given by the settings of train.py; None if the data set is no task."""
    if s.dataset not in TASKS:
        return None
    return read_task(s.dataset, getattr(s, f'{s.dataset}_task'), s.block_size)


def read_task(name: str, text: str, block_size: int) -> LagTask | LookupTask:
    """Parse a task for sequences of `block_size`. Raises UserError if a field is unknown or
    missing, or a value is not a number."""
    fields, given = dataclasses.fields(TASKS[name])[1:], {}
    takes_several = {f.name: f.type is not int for f in fields}
    for word in text.split():
        field, _, value = word.partition('=')
        where = f'{name}_task={text!r}: {word!r}'
        if field not in takes_several:
            raise UserError(f'{where}: allowed fields are {", ".join(takes_several)}')
        try:
            numbers = tuple(map(int, value.split(',')))
        except ValueError:
            raise UserError(f'{where}: {value!r} is no whole number') from None
        if not takes_several[field] and len(numbers) > 1:
            raise UserError(f'{where} is one number')
        given[field] = numbers if takes_several[field] else numbers[0]
    first = fields[0].name
    if first not in given:
        raise UserError(f"{name}_task={text!r}: needs {first}, as '{first}=7,30,100'")
    return TASKS[name](block_size, **given)
