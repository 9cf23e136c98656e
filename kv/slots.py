"""What happens when tokens are appended to a slot: a contiguous one keeps everything, a ring the last W positions.

    ring of W = 4 after 6 tokens:   index  0 1 2 3        a chunk may overwrite keys that its own first queries need, so
                                    holds  4 5 2 3        `append` gathers ring + chunk *before* it writes the last W
"""
import torch

from kv.step import Step
from kv.store import KVStore, cat, cut
from kv.view import KVView

# Ragged decode steps read a contiguous slot up to a multiple of this, so that shapes change only now and then.
BUCKET = 64


class ContiguousSlot(KVStore):
    """Every position of every row, in order: a global slot."""

    def append(self, k, v, step: Step) -> KVView:
        """Write the new K, V (B, Hkv, t, D) of a step; what its queries see."""
        k, v = self.encode(k, v)
        if step.uniform:
            start, end = step.starts[0], step.starts[0] + step.t
            self.write(step.select, start, k, v)
            return KVView(*((k, v) if start == 0 else self.read(step.select, 0, end)), memo=step.memo('contiguous masks', dict))
        if len(set(step.starts)) == 1 and step.t > 1:  # such as prompts: padding stands behind all that its row's queries see
            start = step.starts[0]
            view = KVView(*((k, v) if start == 0 else cat([self.read(step.select, 0, start), (k, v)])),
                          memo=step.memo('contiguous masks', dict))
        elif step.t > 1:
            held = self.read(step.select, 0, max(*step.starts, 1))
            view = KVView(*cat([held, (k, v)]), **step.memo('contiguous', lambda: _tags(step, max(*step.starts, 1))))
        self._write_ragged(k, v, step)
        if step.t == 1:
            read = min(-(-max(*step.ends, 1) // BUCKET) * BUCKET, self.capacity)
            seen = step.memo('seen', lambda: torch.tensor(step.ends, device=self.device))
            view = KVView(*self.read(step.select, 0, read), seen, memo=step.memo('contiguous masks', dict))
        return view

    def _write_ragged(self, k, v, step):
        rows, new_rows, tokens, positions = step.write_indices(self.capacity)
        self.scatter(rows, positions, new_rows, tokens, k, v)


class RingSlot(KVStore):
    """The last `capacity` positions of every row, position p at index p % capacity: a local slot.

    window: keys that a query sees; capacity is the same, or less where sequences stay shorter.
    """

    def __init__(self, window: int, *args):
        super().__init__(*args)
        self.window = window

    def append(self, k, v, step: Step) -> KVView:
        """Write the new K, V (B, Hkv, t, D) of a step; what its queries see."""
        k, v = self.encode(k, v)
        if step.t == 1:  # what this overwrites is just outside the window; where all are visible their order does not matter
            return self._decode_step(k, v, step)
        if len(set(step.starts)) == 1:  # padding, if any, stands behind all that its row's queries see
            view = self._chunk_view(k, v, step)
        else:
            view = self._tagged_view(k, v, step)
        self._write_chunk(k, v, step)
        return view

    def _decode_step(self, k, v, step):
        if step.uniform:
            start = step.starts[0]
            self.write(step.select, start % self.capacity, k, v)
            return KVView(*self.read(step.select, 0, min(start + 1, self.capacity)))
        self._scatter(k, v, step)
        if all(end >= self.capacity for n, end in zip(step.lens, step.ends) if n):  # of the others nothing is asked
            return KVView(*self.read(step.select, 0, self.capacity))
        read = min(max(*step.ends, 1), self.capacity)
        seen = step.memo(('seen', self.capacity), lambda: torch.tensor(
            [min(end, self.capacity) for end in step.ends], device=self.device))
        return KVView(*self.read(step.select, 0, read), seen, memo=step.memo(('ring masks', self.capacity), dict))

    def _chunk_view(self, k, v, step):
        """What a chunk at the same place of every row sees, in order: the held keys in reach, then itself."""
        start = step.starts[0]
        held = min(start, self.window - 1)
        pieces = [self.read(step.select, a, b) for a, b in self.spans(start - held, held)]
        return KVView(*cat(pieces + [(k, v)])) if pieces else KVView(k, v)

    def _tagged_view(self, k, v, step):
        held = self.read(step.select, 0, self.capacity)
        tags = step.memo(('ring', self.capacity), lambda: _tags(step, self.capacity, ring=True))
        return KVView(*cat([held, (k, v)]), **tags, memo=step.memo(('ring masks', self.capacity), dict))

    def _write_chunk(self, k, v, step):
        if not step.uniform:
            return self._scatter(k, v, step)
        kept = min(step.t, self.capacity)
        offset = step.t - kept
        for a, b in self.spans(step.starts[0] + offset, kept):
            self.write(step.select, a, *cut(k, v, offset, offset + b - a))
            offset += b - a

    def _scatter(self, k, v, step):
        rows, new_rows, tokens, positions = step.write_indices(self.capacity)
        indices = step.memo(('ring indices', self.capacity), lambda: positions % self.capacity)
        self.scatter(rows, indices, new_rows, tokens, k, v)

    def spans(self, position: int, n: int) -> list[tuple[int, int]]:
        """Index ranges that hold positions position .. position + n - 1, in order (n <= capacity)."""
        if n == 0:
            return []
        a = position % self.capacity
        if a + n <= self.capacity:
            return [(a, a + n)]
        return [(a, self.capacity), (0, a + n - self.capacity)]


def _tags(step: Step, read: int, ring: bool = False) -> dict[str, torch.Tensor]:
    """q_pos (B, t) and k_pos (B, read + t) of stored indices 0 .. read - 1, then of a chunk that is not yet written."""
    index = torch.arange(read, device=step.device)[None]
    ends = torch.tensor(step.starts, device=step.device)[:, None]
    # the highest position below `ends` that lives at `index`; negative where nothing does
    k_pos = ends - 1 - (ends - 1 - index) % read if ring else index.where(index < ends, -1)
    q_pos = step.positions()
    return dict(q_pos=q_pos, k_pos=torch.cat([k_pos, q_pos], dim=1))  # padding stands behind all that its row's queries see
