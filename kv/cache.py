"""The cache: storage for every slot of the plan, and attention over it.

A forward pass over t new tokens calls `begin` (which checks that they fit before anything is
written), then `attend` in each layer, and finally `commit` (which adds the new tokens).

    y = cache.attend(layer, q, (k, v))     # an owner: append K, V to its slot, then attend
    y = cache.attend(layer, q)             # a reader: attend to what the owner just appended

Lengths are Python ints on the host: steps with rows of equal length never wait for the device.
"""
import torch

from attention import cached_attention
from common.errors import UserError
from kv.plan import LOCAL, KVPlan, Layer, Slot, checked_dtype
from kv.slots import GlobalStore, KVStore, RingStore


class Step:
    """t new tokens for each of `rows`; row b appends the first lens[b] of them to its starts[b].

    rows: cache row numbers, in batch order. select: the same as an index; a slice if they are
        consecutive.
    chunks: (batch rows, tokens, cache rows, start), where the rows of a chunk start at the same
        position. A chunk per row here: padding is neither stored nor attended to.

    Subclasses define
        uniform: whether every row appends all t tokens at the same position.
        last(x): (..., t, D) -> (..., 1, D), the last token of each row that is not padding.
        append(store, new): write encoded K, V of this step. Returns what `attend` needs of them.
        attend(q, visible, layer, sink): attention, given what `append` returned. q (B, H, t, D),
            or (B, H, 1, D) for each row's last token.
    """
    uniform = False

    def __init__(self, t: int, lens: list[int], starts: list[int], rows: list[int], device):
        self.t, self.lens, self.starts, self.rows = t, lens, starts, rows
        self.ends = [start + n for start, n in zip(starts, lens)]
        self.longest = max(self.ends)
        self.end = max(starts) + t  # one past the highest position, padding included
        first = rows[0]
        if rows == list(range(first, first + len(rows))):
            self.select = slice(first, first + len(rows))
        else:
            self.select = on_device(rows, device)
        self.chunks = [(slice(b, b + 1), n, slice(row, row + 1), start)
                       for b, (n, row, start) in enumerate(zip(lens, rows, starts)) if n]


class UniformStep(Step):
    """All rows append t tokens at the same position, which needs no index tensors."""
    uniform = True

    def __init__(self, t, lens, starts, rows, device):
        super().__init__(t, lens, starts, rows, device)
        self.chunks = [(slice(None), t, self.select, starts[0])]

    def last(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., -1:, :]

    def append(self, store: KVStore, new):
        return [store.append(new, self.select, self.starts[0])]

    def attend(self, q, visible, layer, sink):
        [kv] = visible
        return attend_chunk(q, kv, layer, sink, self.t)


class RaggedChunk(Step):
    """Rows append different numbers of tokens, or at different positions.

    positions: (B, t), padding included.
    """

    def __init__(self, t, lens, starts, rows, device):
        super().__init__(t, lens, starts, rows, device)
        self.positions = on_device(starts, device)[:, None] + torch.arange(t, device=device)

    def last(self, x: torch.Tensor) -> torch.Tensor:
        last = on_device([max(n - 1, 0) for n in self.lens], x.device)
        return x.movedim(-2, 1)[torch.arange(len(last), device=x.device), last].unsqueeze(-2)

    def append(self, store: KVStore, new):
        return [store.append(slice_tokens(new, batch, n), rows, start)
                for batch, n, rows, start in self.chunks]

    def attend(self, q, visible, layer, sink):
        y = torch.zeros_like(q)
        for (batch, n, *_), kv in zip(self.chunks, visible):
            y[batch, :, :n] = attend_chunk(q[batch, :, :n], kv, layer, sink, n)
        return y


class RaggedToken(RaggedChunk):
    """Each active row appends one token, at its own position.

    active: batch rows that append a token; None = all. active_rows, active_starts: their cache rows
    and positions. kv_lens: (B,), number of tokens in each row afterwards.
    """

    def __init__(self, t, lens, starts, rows, device):
        super().__init__(t, lens, starts, rows, device)
        active = [b for b, n in enumerate(lens) if n]
        self.active = None if len(active) == len(rows) else on_device(active, device)
        self.active_rows = on_device([rows[b] for b in active], device)
        self.active_starts = on_device([starts[b] for b in active], device)
        self.kv_lens = on_device(self.ends, device)

    def append(self, store: KVStore, new):
        return store.append_token(select_rows(new, self.active), self)

    def attend(self, q, visible, layer, sink):
        kv, kv_lens = visible
        return cached_attention(q, *kv, kv_lens=kv_lens, window=layer.mask, sink=sink)


def make_step(t: int, lens: list[int], starts: list[int], rows: list[int], device) -> Step:
    if len(set(starts)) == 1 and all(n == t for n in lens):
        return UniformStep(t, lens, starts, rows, device)
    kind = RaggedToken if t == 1 else RaggedChunk
    return kind(t, lens, starts, rows, device)


class KVCache:
    """Keys and values of `batch_size` sequences of up to `max_seq_len` tokens, as `plan` says.

    Usually created by `model.new_cache`. Global slots store every position, local ones are rings.

    Args:
        kv_dtype: one of `kv.plan.KV_DTYPES`. compute_dtype: the dtype of the model.
    Raises UserError (a ValueError) if a size is below 1 or kv_dtype is unknown.
    """

    def __init__(self, plan: KVPlan, batch_size: int, max_seq_len: int, kv_dtype: str = 'float32',
                 compute_dtype: torch.dtype = torch.float32, device='cpu'):
        if batch_size < 1 or max_seq_len < 1:
            raise UserError(f'batch_size={batch_size}, max_seq_len={max_seq_len}: '
                            'both must be at least 1')
        if kv_dtype == 'int4' and any(slot.head_dim % 2 for slot in plan.slots):
            raise UserError(f"kv_dtype='int4' stores two values per byte, and head_dim="
                            f'{plan.head_dim} is odd')
        self.plan, self.batch_size, self.max_seq_len = plan, batch_size, max_seq_len
        self.kv_dtype = checked_dtype(kv_dtype)
        self.torch_dtype = torch.uint8 if kv_dtype == 'int4' else getattr(torch, kv_dtype)
        self.compute_dtype, self.device = compute_dtype, torch.device(device)
        self.stores = [self._new_store(slot) for slot in plan.slots]
        # what rows hold beside stored K and V: slot -> half of the last key (`previous_key`)
        floating = self.torch_dtype if self.torch_dtype.is_floating_point else torch.float32
        self.last_keys = {slot.index: KVStore(batch_size, slot.n_kv_head, 1, slot.head_dim // 2,
                                              floating, compute_dtype, self.device, tied=True)
                          for slot in plan.slots if slot.offset}
        self.states = list(self.last_keys.values())
        self._lengths = [0] * batch_size
        self._step = None        # appends the current tokens
        self._visible = {}       # slot -> what this step's `append` returned
        self._unfinished = {}    # row -> its length after the current step

    def _new_store(self, slot: Slot) -> KVStore:
        shape = (self.batch_size, slot.n_kv_head, slot.capacity(self.max_seq_len), slot.head_dim)
        options = (self.torch_dtype, self.compute_dtype, self.device, slot.tied)
        if slot.kind == LOCAL:
            return RingStore(slot.window, *shape, *options)
        return GlobalStore(*shape, *options)

    @property
    def nbytes(self) -> int:
        """Bytes of K/V storage and scales, counted from the tensors: `plan.nbytes(...)`."""
        return sum(store.nbytes for store in (*self.stores, *self.states))

    @property
    def lengths(self) -> torch.Tensor:
        """(B,) int64 on the CPU: number of tokens in each row."""
        return torch.tensor(self._lengths)

    # -- one step of the model --------------------------------------------------------------------

    def begin(self, t: int, lens=None, rows=None) -> Step:
        """Start a step of `t` new tokens for each of `rows` (None = all, in order), of which the
        b-th appends its first lens[b] (None = all). Nothing is written yet.

        Raises UserError if `lens` or `rows` is invalid, or the tokens do not fit.
        """
        rows = list(range(self.batch_size)) if rows is None else self._checked('rows', list(rows))
        if not rows or len(set(rows)) < len(rows):
            raise UserError(f'rows={rows}: at least one, and each only once')
        lens = [t] * len(rows) if lens is None else [int(n) for n in lens]
        if len(lens) != len(rows) or not all(0 <= n <= t for n in lens):
            raise UserError(f'lens={lens}: one number per row is needed ({len(rows)}), '
                            f'each from 0 to {t}')
        for row, n in zip(rows, lens):
            if self._lengths[row] + n > self.max_seq_len:
                raise UserError(f'row {row} holds {self._lengths[row]} tokens and {n} more were '
                                f'given: the cache has max_seq_len={self.max_seq_len}')
        if self._unfinished:
            raise UserError('an earlier step of this cache failed midway and left it half-written: '
                            'reset() it')
        step = make_step(t, lens, [self._lengths[row] for row in rows], rows, self.device)
        self._make_room(step)
        self._step, self._unfinished = step, dict(zip(rows, step.ends))
        return step

    def attend(self, layer: Layer, q: torch.Tensor, kv=None, sink=None) -> torch.Tensor:
        """Append a layer's new K, V to its slot, if it owns one, then attend.

        q: (B, H, t, D), or (B, H, 1, D) for each row's last token (`Step.last`). kv: (k, v), each
        (B, Hkv, t, D), from the slot's owner; None from a reading layer. sink: (H,) logits, or
        None. The result has the shape of q; values at padding are undefined.
        """
        if torch.is_autocast_enabled(self.device.type):  # which would change the stored dtypes
            with torch.autocast(self.device.type, enabled=False):
                return self.attend(layer, q, kv, sink)
        if kv is not None:
            self.append(layer, *kv)
        visible = self._visible[layer.slot]
        if layer.index == self.plan.slots[layer.slot].layers[-1]:  # its last reader
            del self._visible[layer.slot]
        return self._attend(layer, q, visible, sink)

    def append(self, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write an owner's new K, V, each (B, Hkv, t, D), to its slot."""
        store = self.stores[layer.slot]
        new = store.encode(k.detach(), v.detach())  # the cache must not keep a graph alive
        self._visible[layer.slot] = self._append(store, new)

    def previous_key(self, layer: Layer, half: torch.Tensor) -> torch.Tensor:
        """half (B, Hkv, t, ...) of an owner's new keys -> (B, Hkv, 1, ...), that of the token
        before the first, 0 at position 0. Stores the last of each row for the next step."""
        x, step = self.last_keys[layer.slot].tensors[0], self._step
        before = x[step.select].to(half.dtype, copy=True).view_as(half[:, :, :1])
        new = half.detach().flatten(3).to(x.dtype)
        for batch, n, rows, _ in step.chunks:
            x[rows] = new[batch, :, n - 1:n]
        return before

    def _append(self, store: KVStore, new):
        """Write encoded K, V of this step. Returns what `_attend` needs of them."""
        return self._step.append(store, new)

    def _attend(self, layer, q, visible, sink):
        return self._step.attend(q, visible, layer, sink)

    def _make_room(self, step: Step) -> None:
        """No-op: everything is preallocated here; a paged cache takes pages."""

    def commit(self) -> None:
        """Finish the step: its tokens now count as stored."""
        for row, end in self._unfinished.items():
            self._lengths[row] = end
        self._end_step()

    def advance(self, rows: list[int]) -> None:
        """Add a token, which a captured step has written, to the length of each of these rows."""
        for row in self._checked('advance', rows):
            self._lengths[row] += 1

    def abandon(self) -> None:
        """Undo `begin` for a step that has not written anything."""
        self._end_step()

    def _end_step(self) -> None:
        self._step, self._visible, self._unfinished = None, {}, {}

    # -- rows -------------------------------------------------------------------------------------

    def reset(self, rows=None) -> None:
        """Empty `rows` (numbers; None = all). Their memory stays allocated."""
        rows = torch.as_tensor(range(self.batch_size) if rows is None else rows).tolist()
        if not isinstance(rows, list):
            raise UserError(f'reset({rows}): rows are a list of numbers, as reset([{rows}])')
        self._checked('reset', rows)
        self._forget(rows)
        if self._step:  # it failed
            for row in rows:
                self._unfinished.pop(row, None)
            if not self._unfinished:
                self._end_step()

    def _forget(self, rows: list[int]) -> None:
        """Zero V of `rows`: masked positions get weight 0, and 0 * NaN would be NaN. This includes
        positions written by a failed step."""
        for row in rows:
            end = max(self._lengths[row], self._unfinished.get(row, 0))
            self._lengths[row] = 0
            for store in self.row_stores if end else ():
                store.zero_values(row, end)

    @property
    def row_stores(self) -> list[KVStore]:
        """The stores whose rows are the rows of the cache."""
        return [*self.stores, *self.states]

    def fill_(self, length: int, rows=None) -> 'KVCache':
        """Fill `rows` (None = all) with `length` tokens of random K/V, for benchmarks."""
        if not 0 <= length <= self.max_seq_len:
            raise UserError(f'fill_({length}): the cache holds at most '
                            f'max_seq_len={self.max_seq_len} tokens')
        rows = range(self.batch_size) if rows is None else rows
        self.reset(rows)
        for row in rows if length else ():
            self.begin(length, rows=[row])
            for slot in self.plan.slots:
                shape = 2, 1, slot.n_kv_head, length, slot.head_dim
                k, v = torch.randn(shape, dtype=self.compute_dtype, device=self.device)
                self.append(self.plan.layers[slot.owner], k, v)
            self.commit()
        return self

    def _checked(self, what, rows):
        for row in rows:
            if type(row) is not int or not 0 <= row < self.batch_size:
                raise UserError(f'{what}: row {row!r}, but rows are numbered from 0 to '
                                f'{self.batch_size - 1}')
        return rows


def on_device(numbers, device: torch.device, dtype=torch.int64) -> torch.Tensor:
    """A tensor of these numbers (lists, or an array that the caller gives away). The copy to a GPU
    does not wait for it."""
    host = torch.as_tensor(numbers, dtype=dtype)
    if device.type == 'cuda':
        host = host.pin_memory()  # torch.tensor cannot pin what it makes from an array
    return host.to(device, non_blocking=True)


def select_rows(new, rows):
    """Select rows of encoded K, V; None = all."""
    return new if rows is None else tuple(x[rows] for x in new)


def slice_tokens(new, batch, n):
    """The first n tokens of rows `batch` of encoded K, V."""
    whole = batch == slice(None) and n == new[0].size(2)
    return new if whole else tuple(x[batch, :, :n] for x in new)


def attend_chunk(q, kv, layer: Layer, sink, t: int):
    """Attention of t tokens, or of only their last one, q (B, H, 1, D), to encoded K, V that end
    with theirs. Copies have the same layout however the sequence was split,
    so the results are the same."""
    if q.size(2) < t:  # the last `window` keys, or all
        kv = [x[:, :, -layer.window:].clone(memory_format=torch.contiguous_format) for x in kv]
    return cached_attention(q, *kv, window=layer.mask or layer.window, sink=sink)
