"""The engine's cache: global slots use pages from a pool; local slots use one ring per row.

    pool of a slot   (n_pages, Hkv, page_size, D)     the K/V of a row: the pages of that row in the
    page  0 1 2 3                                     `PageTable`, the same ids in the pool of every
    row   0 0 1 0    row 0 has pages [0, 1, 3]        global slot

A row takes a page when it grows into it, and frees it on reset (PagedAttention, Kwon et al. 2023).
"""
from collections.abc import Iterable

import torch

from attention.cached import TILE, cached_attention, kernel_takes
from engine.pages import chunks
from engine.pages.page_table import PageTable
from kv.cache import KVCache, Step, on_device, select_rows, slice_tokens
from kv.plan import GLOBAL, KVPlan, Layer, Slot
from kv.slots import KVStore

PAGE_SIZE = 64


class PagedStore(KVStore):
    """The pool of a global slot: (n_pages, Hkv, page_size, D) of K and of V."""


def table_attention(q, pool, table, kv_lens, sink=None, mask=0):
    """Attention of new tokens over the pages of their rows: with the Triton kernel, which reads
    them in place, or over a contiguous copy.

    q: (B, H, t, D). pool: stored K, V, (n_pages, Hkv, page_size, D). table: (B, n) int32, the pages
    of each row in order; -1 after the last. kv_lens: (B,) int64, number of keys in each row.
    mask: of the layer.
    """
    if not mask and kernel_takes(q, pool[0], sink):
        from attention.kernels.decode import stored_attention
        return stored_attention(q, *pool, kv_lens=kv_lens, table=table)
    missing = (table < 0)[:, :, None, None, None]
    at = table.clamp(min=0).long()
    # (B, n, Hkv, page_size, D) -> (B, Hkv, n * page_size, D); K may be V
    copies = {id(x): x[at].masked_fill_(missing, 0).transpose(1, 2).flatten(2, 3) for x in pool}
    return cached_attention(q, *(copies[id(x)] for x in pool), kv_lens=kv_lens, window=mask,
                            sink=sink)


def copy_row(stores: list[KVStore], source: int, target: int) -> None:
    """Copy row (or page) `source` of each store to `target`."""
    for store in stores:
        for x in store.distinct(store.tensors):
            x[target] = x[source]


class PagedKVCache(KVCache):
    """A cache whose global slots take pages from a pool of `n_pages`, each of `page_size` positions
    of every global slot: `model.new_cache(B, T, kv_dtype, PagedKVCache, n_pages=...)`.

    `nbytes` counts the pool, rings and states, allocated once; `held_nbytes` the part in use by
    rows. A step may raise OutOfPages (a UserError) before anything is written.

    chunks_in_cpp: whether several tokens of a row attend by `engine.pages.chunks`; where nobody has
    compared it with the model's own attention, they do not.
    """
    chunks_in_cpp = False

    def __init__(self, plan: KVPlan, batch_size: int, max_seq_len: int, n_pages: int,
                 page_size: int = PAGE_SIZE, **kinds):
        self.table = PageTable(batch_size, n_pages, page_size)
        super().__init__(plan, batch_size, max_seq_len, **kinds)

    def _new_store(self, slot: Slot) -> KVStore:
        if slot.kind != GLOBAL:
            return super()._new_store(slot)
        return PagedStore(self.table.n_pages, slot.n_kv_head, self.table.page_size, slot.head_dim,
                          self.torch_dtype, self.compute_dtype, self.device, slot.tied)

    @property
    def pools(self) -> list[PagedStore]:
        return [store for store in self.stores if isinstance(store, PagedStore)]

    @property
    def row_stores(self) -> list[KVStore]:
        return [store for store in super().row_stores if not isinstance(store, PagedStore)]

    @property
    def held_nbytes(self) -> int:
        """Bytes of the pages used by rows, each counted once, and of all rings and states."""
        pools = sum(store.nbytes for store in self.pools)
        return self.nbytes - pools // self.table.n_pages * self.table.n_available

    def length(self, row: int) -> int:
        """Number of tokens in a row."""
        return self._lengths[row]

    def begin(self, t: int, lens=None, rows=None) -> Step:
        step = super().begin(t, lens, rows)
        self._places = self._block_table = None  # set by the first global layer for all of them
        return step

    def _make_room(self, step: Step) -> None:
        self._take_pages(zip(step.rows, step.ends))

    def _append(self, store: KVStore, new):
        step = self._step
        if not isinstance(store, PagedStore):
            return super()._append(store, new)
        if self._places is None:
            self._places = self._places_of(step) if step.t == 1 else self._chunk_places(step)
        if step.t == 1:
            active, pages, places = self._places
            return store.scatter(pages, places, select_rows(new, active))
        seen = []
        for (batch, n, *_), (pages, places) in zip(step.chunks, self._places):
            seen.append(slice_tokens(new, batch, n))
            tokens = [x.transpose(1, 2).flatten(0, 1) for x in seen[-1]]
            store.scatter(pages, places, [x[:, :, None] for x in tokens])  # (rows * t, Hkv, 1, D)
        return seen

    def _chunk_places(self, step):
        """For each chunk: page and offset of each of its tokens, row by row."""
        size, of_chunks = self.table.page_size, []
        for batch, n, _, start in step.chunks:
            rows = [self.table.rows[row] for row in step.rows[batch]]
            places = [(pages[position // size], position % size) for pages in rows
                      for position in range(start, start + n)]
            of_chunks.append(on_device(places, self.device).T)
        return of_chunks

    def _places_of(self, step):
        """For a one-token step: the batch rows that append a token (None = all), and the page and
        offset of each."""
        size = self.table.page_size
        jobs = [(b, self.table.rows[row][start // size], start % size)
                for b, (row, start, n) in enumerate(zip(step.rows, step.starts, step.lens)) if n]
        active, pages, places = on_device(jobs, self.device).view(-1, 3).T
        return None if len(jobs) == len(step.rows) else active, pages, places

    def _attend(self, layer: Layer, q, appended, sink):
        step, store = self._step, self.stores[layer.slot]
        in_cpp = self.chunks_in_cpp and not layer.mask
        if in_cpp and q.size(2) > 1 and chunks.takes(q, store.tensors[0]):
            return self._attend_chunks(layer, q, appended, sink)
        if not isinstance(store, PagedStore):
            return super()._attend(layer, q, appended, sink)
        by_kernel = not layer.mask and kernel_takes(q, store.tensors[0], sink)
        only_chunk = step.t > 1 and max(step.starts) == 0  # rows attend to nothing before it
        # plain torch would attend to first chunks row by row
        if only_chunk and (step.uniform or not by_kernel):
            return super()._attend(layer, q, appended, sink)

        table, kv_lens = self._table_of(step)
        if q.size(2) < step.t:
            kv_lens = on_device(step.ends, self.device)
        if by_kernel:
            return table_attention(q, store.tensors, table, kv_lens, sink)
        return torch.cat([
            table_attention(q[rows], store.tensors, table[rows, :n], kv_lens[rows], sink,
                            layer.mask)
            for rows, n in self._slices(step, TILE // store.tensors[0][0].numel())])

    def _attend_chunks(self, layer, q, appended, sink):
        step, store = self._step, self.stores[layer.slot]
        if isinstance(store, PagedStore):
            return chunks.attend(q, store.tensors, step.starts, step.lens, sink=sink,
                                 table=self._table_of(step)[0])
        y = torch.zeros_like(q)
        for (batch, n, *_), kv in zip(step.chunks, appended):
            rows = q[batch, :, :n]
            attended = chunks.attend(rows, kv, [kv[0].size(2) - n] * len(rows), [n] * len(rows),
                                     layer.window, sink)
            if step.uniform:
                return attended
            y[batch, :, :n] = attended
        return y

    def _slices(self, step, most: int):
        """Yield (slice of the batch rows, pages of its longest row). A copy of the pages of these
        rows, each padded to the longest, has about `most` pages, or is of one row."""
        n_pages = [self.table.pages_for(start + step.t) if n else 1
                   for start, n in zip(step.starts, step.lens)]
        a = 0
        while a < len(n_pages):
            b, longest = a + 1, n_pages[a]
            while b < len(n_pages) and (b + 1 - a) * max(longest, n_pages[b]) <= most:
                longest = max(longest, n_pages[b])
                b += 1
            yield slice(a, b), longest
            a = b

    def _table_of(self, step):
        """Block table (B, n) int32, padded with -1, and the keys of each row, padding too, (B,)."""
        if self._block_table is not None:
            return self._block_table
        ends = [start + step.t for start in step.starts]
        width = self.table.pages_for(max(ends))
        rows = [self.table.rows[row][:width] for row in step.rows]
        table = [row + [-1] * (width - len(row)) for row in rows]
        table = on_device(table, self.device, torch.int32)
        self._block_table = table, on_device(ends, self.device)
        return self._block_table

    def reset(self, rows=None) -> None:
        """Empty rows and free their pages, except shared pages."""
        rows = range(self.batch_size) if rows is None else torch.as_tensor(rows).tolist()
        super().reset(rows)
        self._clean([page for row in rows for page in self.table.release(row)])

    def move(self, source: int, target: int) -> None:
        """Move the contents of row `source` to row `target`, and empty `source`."""
        self._checked('move', [source, target])
        if source == target:
            return
        copy_row(self.row_stores, source, target)
        self._lengths[target] = self._lengths[source]
        self._forget([source])
        self._clean(self.table.move(source, target))

    def adopt(self, row: int, pages: list[int], length: int) -> None:
        """Set `row`, which must be empty, to `length` tokens in these pages; those that other rows
        share must be full. The caller fills the rings and states."""
        self.table.adopt(row, pages)
        self._lengths[row] = length

    def cut_page(self, page: int, n: int) -> None:
        """Zero the values of a page after its first n positions (see `_clean`)."""
        for pool in self.pools:
            for x in pool.tensors[1::2]:
                x[page, :, n:] = 0

    def copy_page(self, source: int, target: int) -> None:
        copy_row(self.pools, source, target)

    def unpin(self, page: int) -> None:
        """Unpin a page, and free it unless a row uses it."""
        if self.table.unpin(page):
            self._clean([page])

    def reserve(self, row: int, length: int) -> None:
        """Take the pages for the first `length` tokens of `row`. Raises OutOfPages, in which case
        nothing changes."""
        self._take_pages([(row, length)])

    def _take_pages(self, jobs: Iterable[tuple[int, int]]) -> None:
        """Take pages for the first `end` positions of each (row, end), or raise OutOfPages and
        change nothing."""
        if not self.pools:  # no global layers
            return
        jobs = [job for job in jobs if self.table.pages_needed(*job)]  # none in most decode steps
        needed = sum(self.table.pages_needed(*job) for job in jobs)
        self.table.ensure_free(needed, f'{needed} more pages of {self.table.page_size} positions '
                                       'are needed')
        for job in jobs:
            self.table.extend(*job)

    def _clean(self, freed: list[int]) -> None:
        """Zero the values of freed pages: the next row reads complete pages, with weight 0 past its
        length, and 0 * NaN would be NaN (see `KVCache._forget`)."""
        if freed:
            for pool in self.pools:
                pool.zero_values(on_device(freed, self.device), self.table.page_size)
