"""A view of a cache for decode steps captured as CUDA graphs or compiled: shapes and Python values
are the same in every step, because nothing depends on lengths stored on the host.

    static = StaticCache(cache, n_rows)         # the cache's own storage, its first n_rows rows
    static.set(lengths)                         # before a step: the length of each row
    logits, _ = model(tokens, cache=static)     # (n_rows, 1) -> (n_rows, 1, V)
    static.advance(rows)                        # afterwards: these rows are one token longer
"""
import numpy as np
import torch

from attention.cached import cached_attention
from common.errors import UserError
from engine.pages.cache import PagedKVCache, PagedStore, table_attention
from kv.cache import KVCache, on_device
from kv.plan import Layer
from kv.slots import KVStore, RingStore


class StaticStep:
    """A `kv.cache.Step` of one token per row, with `positions` (B, 1) on the device."""
    t, uniform = 1, False

    def __init__(self, positions: torch.Tensor, end: int):
        self.positions, self.end, self.longest = positions, end, end


class StaticCache:
    """The first `n_rows` rows of `cache`, for steps of one token. Nothing is written for an
    inactive row, and its logits are undefined.

    positions: (n_rows, 1) int64, length of each row, 0 if it is inactive. block_table: (n_rows, n)
    int32, the pages of each row, if the cache is paged.
    """

    def __init__(self, cache: KVCache, n_rows: int):
        self.cache, self.batch_size, self.kv_dtype = cache, n_rows, cache.kv_dtype
        with torch.inference_mode(False):
            like = dict(device=cache.device)
            # everything that depends on lengths is computed on the host, and sent in one copy
            self._kinds = sorted({self._kind(store) for store in cache.stores})
            self._numbers = torch.zeros(1 + 3 * len(self._kinds), n_rows, dtype=torch.int64, **like)
            self.positions = self._numbers[0][:, None]
            # kind of store -> rows or pages, offsets, numbers of keys
            parts = self._numbers[1:].split(3)
            self._places = {kind: part.unbind() for kind, part in zip(self._kinds, parts)}
            self.block_table = None
            if isinstance(cache, PagedKVCache):
                width = cache.table.pages_for(cache.max_seq_len)
                self.block_table = torch.full((n_rows, width), -1, dtype=torch.int32, **like)
        self._versions = [0] * n_rows  # of the cache's page table, that `block_table` came from

    def set(self, lengths: list[int | None]) -> None:
        """Set the lengths of the rows to which the next step appends a token; None = inactive.
        Raises UserError for too many rows, a full row, or one without a page for the token.
        """
        most = self.cache.max_seq_len
        full = any(n is not None and n >= most for n in lengths)
        if len(lengths) > self.batch_size or full:
            raise UserError(f'lengths={lengths}: at most {self.batch_size}, each below '
                            f'max_seq_len={most}')
        held = np.full(self.batch_size, -1)
        held[:len(lengths)] = [-1 if n is None else n for n in lengths]
        numbers = [np.maximum(held, 0)]
        for capacity in self._kinds:
            rows, places = np.arange(self.batch_size), held % (capacity or most)
            if not capacity and self.block_table is not None:
                rows, places = self._pages_of(held), held % self.cache.table.page_size
            numbers += [rows, np.where(held < 0, -1, places),
                        np.minimum(held + 1, capacity or most)]
        self._numbers.copy_(on_device(np.stack(numbers), self._numbers.device))
        if self.block_table is not None:
            self._send_pages()

    @staticmethod
    def _kind(store: KVStore) -> int:
        """The capacity of a ring; 0 for all other stores."""
        return store.capacity if isinstance(store, RingStore) else 0

    def _pages_of(self, held) -> np.ndarray:
        """The page of each row for the token at position held[row]; 0 if that is negative."""
        table = self.cache.table
        try:
            return np.array([table.rows[row][n // table.page_size] if n >= 0 else 0
                             for row, n in enumerate(held.tolist())])
        except IndexError:
            raise UserError(f'lengths={held.tolist()}: reserve pages for the next tokens') from None

    def _send_pages(self) -> None:
        """Update changed rows of `block_table` in place, since a CUDA graph holds its address.
        Entries after the end of a row are -1."""
        source, width = self.cache.table, self.block_table.size(1)
        changed = [row for row, version in enumerate(self._versions)
                   if version != source.versions[row]]
        if changed:  # indices come from the host: no device synchronization
            pages = [source.rows[row][:width] for row in changed]
            pages = [row + [-1] * (width - len(row)) for row in pages]
            rows = on_device(changed, self.block_table.device)
            self.block_table[rows] = on_device(pages, rows.device, torch.int32)
        for row in changed:
            self._versions[row] = source.versions[row]

    def advance(self, rows: list[int]) -> None:
        """Count the token that the step has written to these rows."""
        self.cache.advance(rows)

    def begin(self, t: int, lens=None, rows=None) -> StaticStep:
        if t != 1 or lens is not None or rows is not None:
            raise UserError(f't={t}: a static step appends one token a row')
        return StaticStep(self.positions, self.cache.max_seq_len)

    def attend(self, layer: Layer, q: torch.Tensor, kv=None, sink=None) -> torch.Tensor:
        """Like `KVCache.attend`, but in plain torch operations; q (B, H, 1, D)."""
        store = self.cache.stores[layer.slot]
        if kv is not None:
            rows, places = self.target(layer)
            put(store, rows, places, store.encode(*(x.detach() for x in kv)))
        return self.read(layer, q, sink)

    def read(self, layer: Layer, q: torch.Tensor, sink=None, new=None) -> torch.Tensor:
        """Attention to the slot of a layer, after this step's K and V were written. new: it writes
        them, and q has all that was projected (`attention.kernels.new_key.New`)."""
        if torch.is_autocast_enabled(q.device.type):
            with torch.autocast(q.device.type, enabled=False):
                return self.read(layer, q, sink, new)
        store = self.cache.stores[layer.slot]
        kv_lens = self._places[self._kind(store)][2]
        if new:
            from attention.kernels.decode import stored_attention
            table = self.block_table if isinstance(store, PagedStore) else None
            return stored_attention(q, *store.tensors, kv_lens=kv_lens, table=table, new=new)
        if isinstance(store, PagedStore):
            return table_attention(q, store.tensors, self.block_table, kv_lens, sink,
                                   layer.mask)
        kv = store.read(slice(0, self.batch_size), 0, store.capacity)
        return cached_attention(q, *kv, kv_lens=kv_lens, window=layer.mask, sink=sink)

    def previous_key(self, layer: Layer, half: torch.Tensor) -> torch.Tensor:
        """Like `KVCache.previous_key`; half (B, Hkv, 1, ...)."""
        x = self.cache.last_keys[layer.slot].tensors[0][:self.batch_size]
        before, new = x.clone(), half.detach().flatten(3).to(x.dtype)
        _, places = self.target(layer)
        x.copy_(torch.where((places < 0)[:, None, None, None], x, new))
        return before.to(half.dtype).view_as(half)

    def target(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows or pages, offsets), (B,) each: where the new K and V of a slot are written; a
        negative offset means that they are not."""
        return self._places[self._kind(self.cache.stores[layer.slot])][:2]

    def commit(self) -> None:
        """No-op: `advance` updates the lengths on the host."""

    abandon = commit


def put(store: KVStore, rows, places, new) -> None:
    """Write encoded K, V (B, Hkv, 1, D) to (rows[b], places[b]), unless places[b] is negative.

    The rows of a contiguous store are distinct, so skipped tokens rewrite the existing values and
    shapes stay fixed. Rows of a pool may share a page, so there the first written token replaces
    skipped ones: the same value is written twice. (Filtering would wait for the device.)
    """
    new = store.distinct(new)
    if isinstance(store, PagedStore):
        written = places >= 0
        taken = torch.where(written, torch.arange(len(places), device=places.device),
                            written.int().argmax())
        rows, places, new = rows[taken], places[taken], [x[taken] for x in new]
    at = rows, slice(None), places.clamp(min=0)
    for stored, x in zip(store.distinct(store.tensors), new):
        stored[at] = torch.where((places >= 0)[:, None, None], x[:, :, 0], stored[at])
