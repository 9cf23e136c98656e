"""The caches: preallocated K/V per slot of the plan; global slots hold everything, local slots are rings.

A forward pass over t new tokens goes: `begin` (checks the room, before anything is written), then for each owning layer
`append` (writes its K/V and gives back what its queries and its readers' attend over), then `commit` (the new lengths).

    ring of W = 4 after 6 tokens:   index  0 1 2 3        a chunk may overwrite keys that its own first queries need, so
                                    holds  4 5 2 3        `append` gathers ring + chunk *before* it writes the last W

Lengths live on the host as Python ints, so that a step in which all rows are equally long never waits for the device.
(Rows of different lengths cost small index tensors, copied over at each step.)
"""
from dataclasses import dataclass

import torch

from config.errors import UserError
from kv.plan import KVPlan, Slot
from kv.store import KVStore

TORCH_DTYPES = {'float64': torch.float64, 'float32': torch.float32, 'bfloat16': torch.bfloat16,
                'float16': torch.float16, 'int8': torch.int8}


@dataclass
class KVView:
    """What the queries of one step attend over, for the owner of a slot and its readers alike.

    k, v: (B, Hkv, S, D). Where all rows held equally many tokens they are in order and the tags are None (see
    `attention.cached_attention`); else q_pos (B, t) and k_pos (B, S) say which position each is, -1 or less for none.
    """
    k: torch.Tensor
    v: torch.Tensor
    q_pos: torch.Tensor | None = None
    k_pos: torch.Tensor | None = None


class KVCache:
    """Keys and values of `batch_size` sequences of up to `max_seq_len` tokens, as `plan` says.

    Usually made by `model.new_cache`. `nbytes` is counted from the tensors; it equals `plan.nbytes(...)`.
    """

    def __init__(self, plan: KVPlan, batch_size: int, max_seq_len: int, kv_dtype: str = 'float32',
                 compute_dtype: torch.dtype = torch.float32, device='cpu'):
        if batch_size < 1 or max_seq_len < 1:
            raise UserError(f'batch_size={batch_size}, max_seq_len={max_seq_len}: both must be at least 1')
        if kv_dtype not in TORCH_DTYPES:
            raise UserError(f"kv_dtype={kv_dtype!r}: allowed are {', '.join(map(repr, TORCH_DTYPES))} or 'auto'")
        self.plan, self.batch_size, self.max_seq_len, self.kv_dtype = plan, batch_size, max_seq_len, kv_dtype
        self.device = torch.device(device)
        self.stores = [KVStore(batch_size, plan.n_kv_head, slot.capacity(max_seq_len), plan.head_dim,
                               TORCH_DTYPES[kv_dtype], compute_dtype, self.device) for slot in plan.slots]
        self._lengths = [0] * batch_size
        self._step = None   # the tokens now being appended
        self._views = {}    # slot index -> KVView of this step, for the layers that read another's K/V

    @property
    def nbytes(self) -> int:
        """Bytes of K/V storage and scales, counted from the live tensors."""
        return sum(store.nbytes for store in self.stores)

    @property
    def lengths(self) -> torch.Tensor:
        """(B,) int64 on the CPU: tokens held per row."""
        return torch.tensor(self._lengths)

    def reset(self, rows=None) -> None:
        """Rows (all, if None; else their numbers) hold nothing again. Their memory stays allocated; others are untouched."""
        rows = range(self.batch_size) if rows is None else torch.as_tensor(rows).tolist()
        for row in rows:
            if type(row) is not int or not 0 <= row < self.batch_size:
                raise UserError(f'reset: row {row!r}, but rows are numbered from 0 to {self.batch_size - 1}')
        for row in rows:
            self._lengths[row] = 0
        if len(set(rows)) == self.batch_size:
            self._step, self._views = None, {}

    def fill_(self, length: int) -> 'KVCache':
        """As if every row held `length` tokens, with random K/V: for benchmarks and capacity tests."""
        if not 0 <= length <= self.max_seq_len:
            raise UserError(f'fill_({length}): the cache holds at most max_seq_len={self.max_seq_len} tokens')
        for store in self.stores:
            store.fill_random_()
        self.reset()
        self._lengths = [length] * self.batch_size
        return self

    # -- one step of the model ----------------------------------------------------------------------------------------

    def begin(self, t: int, lens=None) -> 'Step':
        """Announce `t` new tokens per row (of which row b appends its first lens[b]); nothing is written yet.

        Raises:
            UserError (a ValueError): wrong number or values of `lens`, or more tokens than the cache has room for.
        """
        lens = [t] * self.batch_size if lens is None else [int(n) for n in lens]
        if len(lens) != self.batch_size or not all(0 <= n <= t for n in lens):
            raise UserError(f'lens={lens}: one number per row is needed ({self.batch_size}), each from 0 to {t}')
        for row, (length, n) in enumerate(zip(self._lengths, lens)):
            if length + n > self.max_seq_len:
                raise UserError(f'row {row} holds {length} tokens and {n} more were given: '
                                f'the cache has max_seq_len={self.max_seq_len}')
        if self._step is not None:
            raise UserError('an earlier step of this cache failed midway and left it half-written: reset() it')
        self._views = {}
        self._step = Step(t, lens, list(self._lengths))
        return self._step

    def append(self, slot_index: int, k: torch.Tensor, v: torch.Tensor) -> KVView:
        """Write the new K/V (B, Hkv, t, D) of a slot; returns what this step's queries see, readers' too."""
        store, slot, step = self.stores[slot_index], self.plan.slots[slot_index], self._step
        k, v = store.encode(k.detach(), v.detach())  # the storage must not hold on to a graph
        if step.uniform:
            view = _append_uniform(store, slot, k, v, step)
        else:
            view = _append_ragged(store, slot, k, v, step)
        if len(slot.layers) > 1:
            self._views[slot_index] = view
        return view

    def view(self, slot_index: int, layer: int) -> KVView:
        """What the owner of this slot has appended in this step, for `layer`, which reads it.

        The slot's last reader takes the view away with it: where it is a decoded copy (int8), only those still to be
        read are alive.
        """
        last = layer == self.plan.slots[slot_index].layers[-1]
        return self._views.pop(slot_index) if last else self._views[slot_index]

    def commit(self) -> None:
        """The step is done: the new tokens count as held."""
        self._lengths = [length + n for length, n in zip(self._step.starts, self._step.lens)]
        self._step, self._views = None, {}


@dataclass
class Step:
    """t new tokens per row, of which row b appends the first lens[b] behind its starts[b]."""
    t: int
    lens: list[int]
    starts: list[int]

    @property
    def uniform(self) -> bool:
        return all(n == self.t for n in self.lens) and len(set(self.starts)) == 1

    @property
    def end(self) -> int:
        """One past the highest position of this step, padding included."""
        return max(self.starts) + self.t

    def positions(self, device) -> torch.Tensor:
        """(B, t) absolute positions of the new tokens."""
        return torch.tensor(self.starts, device=device)[:, None] + torch.arange(self.t, device=device)


def _append_uniform(store: KVStore, slot: Slot, k, v, step: Step) -> KVView:
    """All rows equally long: slices only. k, v are encoded chunks."""
    start, t, capacity = step.starts[0], step.t, store.capacity
    if not slot.window:
        store.write(start, k, v)
        return KVView(*store.decode(*store.read(0, start + t)))
    if t == 1:  # what this overwrites is just outside the window; with all W keys visible their order does not matter
        store.write(start % capacity, k, v)
        return KVView(*store.decode(*store.read(0, min(start + 1, capacity))))
    view = _chunk_view(store, slot, k, v, start)
    kept = min(t, capacity)
    offset = t - kept
    for a, b in _ring_spans(start + offset, kept, capacity):
        store.write(a, *store.cut(k, v, offset, offset + b - a))
        offset += b - a
    return view


def _ring_spans(position: int, n: int, capacity: int) -> list[tuple[int, int]]:
    """Index ranges that hold positions position .. position + n - 1 of a ring, in order (n <= capacity)."""
    if n == 0:
        return []
    a = position % capacity
    if a + n <= capacity:
        return [(a, a + n)]
    return [(a, capacity), (0, a + n - capacity)]


def _chunk_view(store: KVStore, slot: Slot, k, v, start: int) -> KVView:
    """What a chunk at `start` of every row sees, in order, before it is written: the held keys in reach, then itself."""
    held = min(start, slot.window - 1) if slot.window else start
    pieces = [store.read(a, b) for a, b in _ring_spans(start - held, held, store.capacity)]
    return KVView(*store.decode(*store.cat(pieces + [(k, v)])))  # a copy, so the storage may be written now


def _append_ragged(store: KVStore, slot: Slot, k, v, step: Step) -> KVView:
    """Rows of different lengths, or that append differently many tokens."""
    if step.t == 1:  # as in `_append_uniform`, what this overwrites is just outside the window
        _write_rows(store, k, v, step)
        return _tagged_view(store, slot, step)
    if len(set(step.starts)) == 1:  # such as prompts: padding stands behind all that its row's queries see
        view = _chunk_view(store, slot, k, v, step.starts[0])
    else:
        view = _tagged_view(store, slot, step, (k, v))
    _write_rows(store, k, v, step)
    return view


def _write_rows(store: KVStore, k, v, step: Step) -> None:
    """The first lens[b] tokens of row b, or the last of them that a ring keeps."""
    rows, indices, tokens = [], [], []
    for row, (start, n) in enumerate(zip(step.starts, step.lens)):
        kept = range(n - min(n, store.capacity), n)
        rows += [row] * len(kept)
        indices += [(start + j) % store.capacity for j in kept]
        tokens += kept
    if rows:
        store.scatter(*(torch.tensor(x, device=store.device) for x in (rows, indices, tokens)), k, v)


def _tagged_view(store: KVStore, slot: Slot, step: Step, chunk=None) -> KVView:
    """The storage with the position of every query and key; then `chunk`, if this step's K, V are not yet written."""
    device = store.device
    held = step.starts if chunk else [start + n for start, n in zip(step.starts, step.lens)]
    read = store.capacity if slot.window else max(*held, 1)
    index, ends = torch.arange(read, device=device)[None], torch.tensor(held, device=device)[:, None]
    # the highest position below `ends` that lives at `index`; negative where nothing does
    k_pos = ends - 1 - (ends - 1 - index) % store.capacity if slot.window else index.where(index < ends, -1)
    q_pos = step.positions(device)                                          # (B, t)
    stored = store.read(0, read)
    if chunk:
        k_pos = torch.cat([k_pos, q_pos], dim=1)  # (B, read + t); padding stands behind all that its row's queries see
        stored = store.cat([stored, chunk])
    return KVView(*store.decode(*stored), q_pos, k_pos)
