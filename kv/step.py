"""One step of a cache: which rows append how many tokens, and the index tensors made from that, each of them once."""
import torch


class Step:
    """t new tokens for each of `rows`, of which the b-th row appends the first lens[b] behind its starts[b].

    rows: numbers of cache rows, in the order of the rows of the tokens. Lengths are on the host, so that a step in which
    all rows are equally long makes no index tensors at all; the others share those of `memo` among their layers.
    """

    def __init__(self, t: int, lens: list[int], starts: list[int], rows: list[int], device):
        self.t, self.lens, self.starts, self.rows, self.device = t, lens, starts, rows, device
        self.uniform = all(n == t for n in lens) and len(set(starts)) == 1
        self._memo = {}

    @property
    def ends(self) -> list[int]:
        """Tokens that each row holds after this step."""
        return [start + n for start, n in zip(self.starts, self.lens)]

    @property
    def end(self) -> int:
        """One past the highest position of this step, padding included."""
        return max(self.starts) + self.t

    def memo(self, key, make):
        """make(), called once per step and key."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def positions(self) -> torch.Tensor:
        """(B, t) absolute positions of the new tokens."""
        return self.memo('positions', lambda: torch.tensor(self.starts, device=self.device)[:, None]
                         + torch.arange(self.t, device=self.device))

    @property
    def select(self):
        """What picks this step's rows out of a tensor of all the cache's rows: a slice where they are neighbours."""
        first = self.rows[0]
        if self.rows == list(range(first, first + len(self.rows))):
            return slice(first, first + len(self.rows))
        return self.memo('rows', lambda: torch.tensor(self.rows, device=self.device))

    def write_indices(self, capacity: int) -> tuple[torch.Tensor, ...]:
        """(cache rows, step rows, tokens, positions) of all tokens that are to be written, flat; of a row that appends
        more than `capacity` only the last."""
        return self.memo(('write', capacity), lambda: self._write_indices(capacity))

    def _write_indices(self, capacity):
        kept = [range(n - min(n, capacity), n) for n in self.lens]
        picked = [(self.rows[b], b, j, self.starts[b] + j) for b, tokens in enumerate(kept) for j in tokens]
        return torch.tensor(picked, dtype=torch.int64, device=self.device).view(-1, 4).unbind(1)
