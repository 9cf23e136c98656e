"""The cache: storage for every slot of the plan, and how many tokens each row holds.

A forward pass over t new tokens goes: `begin` (checks the room, before anything is written), then for each owning layer
`append` (writes its K/V and gives back what its queries and its readers' attend over), then `commit` (the new lengths).

Lengths live on the host as Python ints, so that a step never waits for the device to say how long its rows are.
"""
import torch

from config.errors import UserError
from kv.plan import LOCAL, KVPlan, Slot
from kv.slots import ContiguousSlot, RingSlot
from kv.step import Step
from kv.store import KVStore
from kv.view import KVView

TORCH_DTYPES = {'float64': torch.float64, 'float32': torch.float32, 'bfloat16': torch.bfloat16,
                'float16': torch.float16, 'int8': torch.int8}


class KVCache:
    """Keys and values of `batch_size` sequences of up to `max_seq_len` tokens, as `plan` says.

    Usually made by `model.new_cache`. Global slots are contiguous, local ones rings. `nbytes` is counted from the tensors;
    it equals `plan.nbytes(...)`.
    """

    def __init__(self, plan: KVPlan, batch_size: int, max_seq_len: int, kv_dtype: str = 'float32',
                 compute_dtype: torch.dtype = torch.float32, device='cpu'):
        if batch_size < 1 or max_seq_len < 1:
            raise UserError(f'batch_size={batch_size}, max_seq_len={max_seq_len}: both must be at least 1')
        if kv_dtype not in TORCH_DTYPES:
            raise UserError(f"kv_dtype={kv_dtype!r}: allowed are {', '.join(map(repr, TORCH_DTYPES))} or 'auto'")
        self.plan, self.batch_size, self.max_seq_len, self.kv_dtype = plan, batch_size, max_seq_len, kv_dtype
        self.torch_dtype, self.compute_dtype, self.device = TORCH_DTYPES[kv_dtype], compute_dtype, torch.device(device)
        self.stores = [self._new_slot(slot) for slot in plan.slots]
        self._lengths = [0] * batch_size
        self._step = None   # the tokens now being appended
        self._views = {}    # slot index -> KVView of this step, for the layers that read another's K/V

    def _new_slot(self, slot: Slot) -> KVStore:
        shape = (self.batch_size, self.plan.n_kv_head, slot.capacity(self.max_seq_len), self.plan.head_dim)
        kind = (self.torch_dtype, self.compute_dtype, self.device)
        return RingSlot(slot.window, *shape, *kind) if slot.kind == LOCAL else ContiguousSlot(*shape, *kind)

    @property
    def row_stores(self) -> list[KVStore]:
        """The stores whose rows are those of the cache."""
        return self.stores

    @property
    def nbytes(self) -> int:
        """Bytes of K/V storage and scales, counted from the live tensors."""
        return sum(store.nbytes for store in self.stores)

    @property
    def lengths(self) -> torch.Tensor:
        """(B,) int64 on the CPU: tokens held per row."""
        return torch.tensor(self._lengths)

    def held(self, row: int) -> int:
        """Tokens that a row holds."""
        return self._lengths[row]

    def reset(self, rows=None) -> None:
        """Rows (all, if None; else their numbers) hold nothing again. Their memory stays allocated; others are untouched."""
        rows = list(range(self.batch_size)) if rows is None else torch.as_tensor(rows).tolist()
        if not isinstance(rows, list):
            raise UserError(f'reset({rows}): rows are a list of numbers, as reset([{rows}])')
        self._checked('reset', rows)
        self._forget(rows)
        if len(set(rows)) == self.batch_size:
            self._step, self._views = None, {}

    def move(self, source: int, target: int) -> None:
        """Row `target` holds what row `source` held, which then holds nothing."""
        self._checked('move', [source, target])
        if source == target:
            return
        for store in self.row_stores:
            store.copy_row(source, target)
        self._lengths[target] = self._lengths[source]
        self._forget([source])

    def _forget(self, rows: list[int]) -> None:
        """Rows hold nothing. What they held stays in memory, behind masks, until it is overwritten; but a masked key counts
        for 0 times its value, so if that were NaN, one bad request would spoil those that get its row after it. A step
        that failed midway has written beyond the lengths."""
        written = dict(zip(self._step.rows, self._step.ends)) if self._step else {}
        end = max((max(self._lengths[row], written.get(row, 0)) for row in rows), default=0)
        for row in rows:
            self._lengths[row] = 0
        if end:
            for store in self.row_stores:
                store.zero_values(rows, end)

    def fill_(self, length: int) -> 'KVCache':
        """As if every row held `length` tokens, with random K/V: for benchmarks and capacity tests."""
        if not 0 <= length <= self.max_seq_len:
            raise UserError(f'fill_({length}): the cache holds at most max_seq_len={self.max_seq_len} tokens')
        self.reset()
        every_row = list(range(self.batch_size))
        self._make_room(Step(length, [length] * self.batch_size, [0] * self.batch_size, every_row, self.device))
        for store in self.stores:
            store.fill_random_()
        self._lengths = [length] * self.batch_size
        return self

    def _checked(self, what, rows):
        for row in rows:
            if type(row) is not int or not 0 <= row < self.batch_size:
                raise UserError(f'{what}: row {row!r}, but rows are numbered from 0 to {self.batch_size - 1}')
        return rows

    # -- one step of the model ----------------------------------------------------------------------------------------

    def begin(self, t: int, lens=None, rows=None) -> Step:
        """Announce `t` new tokens for each of `rows` (None = all of them, in order), of which the b-th appends its first
        lens[b]; nothing is written yet.

        Raises:
            UserError (a ValueError): wrong number or values of `lens`, or more tokens than the cache has room for.
        """
        rows = list(range(self.batch_size)) if rows is None else self._checked('rows', list(rows))
        if not rows or len(set(rows)) < len(rows):
            raise UserError(f'rows={rows}: at least one, and each only once')
        lens = [t] * len(rows) if lens is None else [int(n) for n in lens]
        if len(lens) != len(rows) or not all(0 <= n <= t for n in lens):
            raise UserError(f'lens={lens}: one number per row is needed ({len(rows)}), each from 0 to {t}')
        for row, n in zip(rows, lens):
            if self._lengths[row] + n > self.max_seq_len:
                raise UserError(f'row {row} holds {self._lengths[row]} tokens and {n} more were given: '
                                f'the cache has max_seq_len={self.max_seq_len}')
        if self._step is not None:
            raise UserError('an earlier step of this cache failed midway and left it half-written: reset() it')
        step = Step(t, lens, [self._lengths[row] for row in rows], rows, self.device)
        self._make_room(step)
        self._step, self._views = step, {}
        return step

    def _make_room(self, step: Step) -> None:
        """Everything is allocated beforehand here; a paged cache takes pages."""

    def advance(self, rows: list[int]) -> None:
        """These rows hold one token more: what a static step (`kv.static`) has written."""
        for row in self._checked('advance', rows):
            self._lengths[row] += 1

    def abandon(self) -> None:
        """Undo `begin`; for a step of which nothing has been written."""
        self._step = None

    def append(self, slot_index: int, k: torch.Tensor, v: torch.Tensor) -> KVView:
        """Write the new K/V (B, Hkv, t, D) of a slot; returns what this step's queries see, readers' too."""
        if torch.is_autocast_enabled(self.device.type):  # what is stored has dtypes of its own, some that it cannot join
            with torch.autocast(self.device.type, enabled=False):
                return self.append(slot_index, k, v)
        # detached: the storage must not hold on to a graph
        view = self._views[slot_index] = self.stores[slot_index].append(k.detach(), v.detach(), self._step)
        return view

    def view(self, slot_index: int) -> KVView:
        """What the owner of this slot has appended in this step, for a layer that reads it."""
        return self._views[slot_index]

    def commit(self) -> None:
        """The step is done: the new tokens count as held."""
        for row, end in zip(self._step.rows, self._step.ends):
            self._lengths[row] = end
        self._step, self._views = None, {}
