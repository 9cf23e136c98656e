"""A cache as a decode step sees it that is captured once and replayed (CUDA graphs) or compiled: where its tokens go and which
keys they see is computed on the device, from positions that lie there. Nothing depends on lengths known to the host, so
shapes and Python values are the same in every step.

    static = StaticCache(cache, n_rows)         # the cache's own storage, its first n_rows rows
    static.set(lengths)                         # before a step: tokens that each row holds; None = it takes no part
    logits, _ = model(tokens, cache=static)     # (n_rows, 1) -> (n_rows, 1, V)
    cache.advance(rows)                         # afterwards: these hold one token more
"""
import torch

from config.errors import UserError
from kv.cache import KVCache
from kv.paged import PagedSlot
from kv.slots import RingSlot
from kv.store import KVStore, Target
from kv.view import KVView


class StaticStep:
    """One token for each row, at `positions` (B, 1); what `kv.step.Step` is to a model, without numbers on the host."""
    t, uniform = 1, False

    def __init__(self, positions: torch.Tensor, end: int):
        self._positions, self.end = positions.clamp(min=0), end

    def positions(self) -> torch.Tensor:
        return self._positions


class StaticCache:
    """The first `n_rows` rows of `cache`, for steps of one token. A row that takes no part has position -1: nothing of it is
    written, and its logits mean nothing.

    positions: (n_rows, 1) int64, tokens that each row holds. table: (n_rows, n) int32, its pages, where the cache is paged.
    """

    def __init__(self, cache: KVCache, n_rows: int):
        self.cache, self.batch_size, self.kv_dtype, self.plan = cache, n_rows, cache.kv_dtype, cache.plan
        with torch.inference_mode(False):
            self.positions = torch.full((n_rows, 1), -1, dtype=torch.int64, device=cache.device)
            self._rows = torch.arange(n_rows, device=cache.device)[:, None]
            self.table = None
            if hasattr(cache, 'table'):
                width = cache.table.pages_for(cache.max_seq_len)
                self.table = torch.full((n_rows, width), -1, dtype=torch.int32, device=cache.device)
        # what `table` holds: pages of each row, and of which version of the cache's table they are
        self._sent, self._versions = [[] for _ in range(n_rows)], [0] * n_rows
        self._targets, self._views = {}, {}

    # -- on the host, before a step -----------------------------------------------------------------------------------

    def set(self, lengths: list[int | None]) -> None:
        """The next step appends a token to each row b, which holds lengths[b] tokens; None: it takes no part. Pages for it
        must have been taken (`reserve`).

        Raises:
            UserError: more rows than there are, or a row that is full.
        """
        if len(lengths) > self.batch_size or any(n is not None and n >= self.cache.max_seq_len for n in lengths):
            raise UserError(f'lengths={lengths}: at most {self.batch_size}, each below max_seq_len={self.cache.max_seq_len}')
        held = [-1 if n is None else n for n in lengths] + [-1] * (self.batch_size - len(lengths))
        self.positions.copy_(_on_host(held, torch.int64, self.positions)[:, None], non_blocking=True)
        if self.table is not None:
            self._send_pages()

    def _send_pages(self) -> None:
        """Write to `table`, in place since a CUDA graph has its address, those entries that have changed: most rows have the
        pages that they had, or one more. Entries behind the end of a row are -1."""
        source, entries, sent = self.cache.table, [], {}
        for row, version in enumerate(source.versions[:self.batch_size]):
            if version != self._versions[row]:
                old, new = self._sent[row], sent.setdefault(row, source.rows[row][:self.table.size(1)])
                first = len(old) if new[:len(old)] == old else 0
                pages = new[first:] + [-1] * (len(old) - len(new))
                entries += [(row, first + k, page) for k, page in enumerate(pages)]
        for row, pages in sent.items():  # until they are there: an interruption makes the next call send all of the row
            self._sent[row], self._versions[row] = [None] * max(len(self._sent[row]), len(pages)), -1
        if entries:  # indices made on the host: nothing waits for the device
            rows, places, pages = _on_host(entries, torch.int64, self.table).to(self.table.device, non_blocking=True).T
            self.table.index_put_((rows, places), pages.int())
        for row, pages in sent.items():
            self._sent[row], self._versions[row] = pages, source.versions[row]

    # -- what the model calls, with nothing but the device's numbers --------------------------------------------------

    def begin(self, t: int, lens=None, rows=None) -> StaticStep:
        if t != 1 or lens is not None or rows is not None:
            raise UserError(f't={t}: a static step appends one token a row')
        self._targets, self._views = {}, {}
        return StaticStep(self.positions, self.cache.max_seq_len)

    def target(self, slot: int) -> Target:
        """Where a slot's new K and V go."""
        store = self.cache.stores[slot]
        kind = _kind(store)
        if kind not in self._targets:
            self._targets[kind] = self._places(store)
        return Target(store.k, store.v, *self._targets[kind])

    def append(self, slot: int, k: torch.Tensor, v: torch.Tensor) -> KVView:
        """Write K, V (B, Hkv, 1, D) by plain torch operations."""
        store = self.cache.stores[slot]
        store.put(self.target(slot), *store.encode(k.detach(), v.detach()), own_rows=not isinstance(store, PagedSlot))
        return self.view(slot)

    def view(self, slot: int) -> KVView:
        """What the queries see of a slot, once it has been written."""
        store = self.cache.stores[slot]
        kind = _kind(store)
        if kind not in self._views:
            seen = self.positions[:, 0] + 1
            self._views[kind] = (seen.clamp(max=store.capacity) if isinstance(store, RingSlot) else seen), {}
        seen, memo = self._views[kind]
        if kind == 'pages':
            return KVView(store.k, store.v, seen, self.table, memo=memo)
        first = slice(0, self.batch_size)
        return KVView(*store.read(first, 0, store.capacity), seen, memo=memo)

    def commit(self) -> None:
        """Nothing: `KVCache.advance` counts, on the host."""

    abandon = commit

    def _places(self, store: KVStore):
        """(rows, places), (B, 1) both."""
        if isinstance(store, RingSlot):
            return self._rows, torch.where(self.positions < 0, -1, self.positions % store.capacity)
        if not isinstance(store, PagedSlot):
            return self._rows, self.positions
        size = self.cache.table.page_size
        pages = self.table.gather(1, self.positions.clamp(min=0) // size).long()
        return pages, torch.where(self.positions < 0, -1, self.positions % size)


def _kind(store: KVStore):
    """Slots of one kind have their tokens at the same places."""
    return store.capacity if isinstance(store, RingSlot) else 'pages' if isinstance(store, PagedSlot) else 'contiguous'


def _on_host(numbers, dtype, like) -> torch.Tensor:
    """Pinned where the device copies from it meanwhile; the allocator keeps it until the copy is done."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=like.device.type == 'cuda')
