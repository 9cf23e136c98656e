"""The engine's cache: global slots in pages from one pool, local slots rings per row.

    pool of a slot   (n_pages, Hkv, page_size, D)         what a row holds: the pages of `kv.pages.PageTable`, the same
    page  0 1 2 3                                         ids in the pool of every global slot
    row   0 0 1 0      row 0 holds pages [0, 1, 3]

A row takes a page when it grows into it and gives it back when it is reset, so memory goes by tokens that are held, not by
rows times the longest sequence. PagedAttention (Kwon et al. 2023).
"""
import torch

from config.errors import UserError
from kv.cache import KVCache
from kv.pages import PageTable
from kv.plan import GLOBAL, KVPlan, Slot
from kv.step import Step
from kv.store import KVStore, cat
from kv.view import KVView, PageList

PAGE_SIZE = 64
# Pages of others that a piece of the pool may have among those of a step, before its own are gathered instead.
MOST_FOREIGN = 0.25


class PagedSlot(KVStore):
    """The pool of a global slot: (n_pages, Hkv, page_size, D) of K and of V."""

    def __init__(self, table: PageTable, list_pages, *args):
        super().__init__(*args)
        self.table, self.list_pages = table, list_pages

    @property
    def by_table(self) -> bool:
        """Whether attention is told a table of pages, as the Triton kernel wants it, or, on a CPU, a list in their order."""
        return self.device.type == 'cuda'

    def append(self, k, v, step: Step) -> KVView:
        """Write the new K, V (B, Hkv, t, D) of a step, whose pages have been taken; what its queries see."""
        k, v = self.encode(k, v)
        if self.by_table and max(step.starts) > 0:  # (a prompt that begins is attended over as it came)
            self._write(k, v, step)
            seen = step.memo('seen', lambda: torch.tensor([start + step.t for start in step.starts], device=self.device))
            return KVView(self.k, self.v, seen, step.memo('table', lambda: self._table(step)), memo=step.memo('masks', dict))
        if step.t == 1:
            self._write(k, v, step)
            return KVView(self.k, self.v, pages=step.memo('pages', lambda: self.list_pages(step)))
        memo = step.memo('paged masks', dict)
        held = max(step.starts)
        if held == 0:  # padding stands behind all that its row's queries see
            view = KVView(k, v, memo=memo)
        else:
            tags, stored = self._tags(step, held), self._gather(step, held)
            if tags:  # what a row does not hold may be NaN of another's, and masked it counts for 0 times that
                for x in stored[1]:
                    x.masked_fill_(tags['k_pos'][:, None, :held, None] < 0, 0)
            view = KVView(*cat([stored, (k, v)]), **tags, memo=memo)
        self._write(k, v, step)
        return view

    def _write(self, k, v, step):
        pages, offsets, rows, tokens = step.memo('page indices', lambda: self._indices(step))
        self.scatter(pages, offsets, rows, tokens, k, v)

    def _indices(self, step):
        """(pages, offsets in them, step rows, tokens) of all tokens that are to be written, flat."""
        size, ids = self.table.page_size, []
        for row, start, end in zip(step.rows, step.starts, step.ends):
            held = self.table.rows[row]
            ids += [held[position // size] for position in range(start, end)]
        _, rows, tokens, positions = step.write_indices(max(step.t, 1))
        return torch.tensor(ids, dtype=torch.int64, device=self.device), positions % size, rows, tokens

    def _table(self, step) -> torch.Tensor:
        """(B, n) int32: the pages of the step's rows, filled up with -1."""
        rows = [self.table.rows[row] for row in step.rows]
        width = max(1, *map(len, rows))
        return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32, device=self.device)

    def _gather(self, step, n: int):
        """K, V of the step's rows at positions 0 .. n - 1, as stored; a copy."""
        def ids():
            n_pages = self.table.pages_for(n)
            rows = [(self.table.rows[row] + [0] * n_pages)[:n_pages] for row in step.rows]
            return torch.tensor(rows, device=self.device)
        ids = step.memo(('gathered', n), ids)                              # (B, pages)

        def gather(x):
            return x[ids].transpose(1, 2).flatten(2, 3)[:, :, :n]          # (B, Hkv, n, D)
        return tuple(tuple(gather(x) for x in kv) for kv in (self.k, self.v))

    def _tags(self, step, held):
        """Nothing where every row holds as much: the keys are in order. Else (B, t) and (B, held + t) positions."""
        if len(set(step.starts)) == 1:
            return {}

        def tags():
            index = torch.arange(held, device=self.device)[None]
            starts = torch.tensor(step.starts, device=self.device)[:, None]
            k_pos = torch.cat([index.where(index < starts, -1), step.positions()], dim=1)
            return dict(q_pos=step.positions(), k_pos=k_pos)
        return step.memo('paged tags', tags)


def _entries(table: PageTable, rows: list[int]):
    """[(page, row of the step, its first position)] in the order of the pool, and their runs (see `PageList`); where
    several rows hold a page, the second and further ones come last."""
    entries = sorted((page, b, place * table.page_size) for b, row in enumerate(rows) if row is not None
                     for place, page in enumerate(table.rows[row]))
    first_holders, others = [], []
    for entry in entries:
        (others if first_holders and first_holders[-1][0] == entry[0] else first_holders).append(entry)
    ordered, runs = _runs(first_holders, nobody=len(rows))
    if others:
        runs.append((len(ordered), len(ordered) + len(others), None))
    return ordered + others, runs


def _runs(entries, nobody):
    """The entries, and runs of them (see `PageList`): one slice of the pool where pages of others in between are few."""
    if not entries:
        return [], []
    lo, hi = entries[0][0], entries[-1][0] + 1
    if hi - lo > (1 + MOST_FOREIGN) * len(entries):
        return entries, [(0, len(entries), None)]
    filled = dict.fromkeys(range(lo, hi))
    filled |= {entry[0]: entry for entry in entries}
    return [entry or (page, nobody, 0) for page, entry in filled.items()], [(0, hi - lo, lo)]


class PagedKVCache(KVCache):
    """A cache whose global slots take pages from a pool of `n_pages`, each of `page_size` positions of every global slot.

    `nbytes` counts pool and rings, allocated once; `held_nbytes` what rows hold of it now.

    Raises:
        OutOfPages (a UserError): by a step, before anything is written.
    """

    def __init__(self, plan: KVPlan, batch_size: int, max_seq_len: int, n_pages: int, page_size: int = PAGE_SIZE, **kinds):
        if page_size < 1 or n_pages < 1:
            raise UserError(f'page_size={page_size}, n_pages={n_pages}: both must be at least 1')
        self.table = PageTable(batch_size, n_pages, page_size)
        self._listed = None, None  # of the last decode step; most find it as they need it
        super().__init__(plan, batch_size, max_seq_len, **kinds)

    def _new_slot(self, slot: Slot) -> KVStore:
        if slot.kind != GLOBAL:
            return super()._new_slot(slot)
        shape = (self.table.n_pages, self.plan.n_kv_head, self.table.page_size, self.plan.head_dim)
        return PagedSlot(self.table, self._list_pages, *shape, self.torch_dtype, self.compute_dtype, self.device)

    @property
    def pools(self) -> list[PagedSlot]:
        return [store for store in self.stores if isinstance(store, PagedSlot)]

    @property
    def row_stores(self) -> list[KVStore]:
        return [store for store in self.stores if not isinstance(store, PagedSlot)]

    @property
    def held_nbytes(self) -> int:
        """Bytes of the pages that rows hold, each counted once, and of all rings."""
        pools = sum(store.nbytes for store in self.pools)
        return self.nbytes - pools // self.table.n_pages * self.table.n_available

    def reset(self, rows=None) -> None:
        """Rows hold nothing again, and their pages are free unless others hold them."""
        rows = range(self.batch_size) if rows is None else torch.as_tensor(rows).tolist()
        super().reset(rows)
        self._clean([page for row in rows for page in self.table.release(row)])

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self._clean(self.table.move(source, target))

    def fork(self, source: int, target: int) -> None:
        """`target`, which must hold nothing, holds what `source` does: its pages are shared until one of them writes to
        the last, rings are copied."""
        self._checked('fork', [source, target])
        if self._lengths[target]:
            raise UserError(f'fork: row {target} holds {self._lengths[target]} tokens; reset it first')
        self.table.fork(source, target)
        for store in self.row_stores:
            store.copy_row(source, target)
        self._lengths[target] = self._lengths[source]

    def adopt(self, row: int, pages: list[int], length: int) -> None:
        """`row`, which must hold nothing, holds `length` tokens in these pages, as others may; its rings are to be filled."""
        self._checked('adopt', [row])
        if self._lengths[row] or length > self.max_seq_len:
            raise UserError(f'adopt: row {row} holds {self._lengths[row]} tokens, and {length} are given to it: it must hold '
                            f'none, and at most max_seq_len={self.max_seq_len} then')
        self.table.adopt(row, pages)
        self._lengths[row] = length

    def give_back(self, page: int) -> None:
        """A page that was kept beyond its rows is free, unless a row holds it."""
        if self.table.let_go(page):
            self._clean([page])

    def reserve(self, row: int, length: int) -> None:
        """Take the pages for the first `length` tokens of `row` now. OutOfPages: and nothing has changed."""
        self._checked('reserve', [row])
        if length > self.max_seq_len:
            raise UserError(f'reserve: {length} tokens for row {row}: the cache has max_seq_len={self.max_seq_len}')
        self._take_pages([(row, self._lengths[row], length)])

    def _list_pages(self, step: Step) -> PageList:
        """The pages of a step of one token."""
        rows = [row if n else None for row, n in zip(step.rows, step.lens)]  # those that wait need not be attended over
        key = self.table.version, rows
        if self._listed[0] != key:
            entries, runs = _entries(self.table, rows)
            with torch.inference_mode(False):  # what is kept must serve a step that records a graph, too
                self._listed = key, (torch.tensor(entries, dtype=torch.int64, device=self.device).view(-1, 3).unbind(1), runs)
        indices, runs = self._listed[1]
        return PageList(*indices, torch.tensor(step.ends + [0], device=self.device), runs)

    def _make_room(self, step: Step) -> None:
        self._take_pages([job for job in zip(step.rows, step.starts, step.ends) if job[1] < job[2]])

    def _take_pages(self, jobs: list[tuple[int, int, int]]) -> None:
        """Pages for each (row, tokens held, tokens to be held), or OutOfPages and nothing has changed."""
        if not self.pools:  # a model of local layers alone has nothing to put into them
            return
        needed = self.table.missing(jobs)
        self.table.make_free(needed, f'{needed} more pages of {self.table.page_size} positions are needed')
        for job in jobs:
            for source, target in self.table.extend(*job):
                for pool in self.pools:
                    pool.copy_row(source, target)

    def _clean(self, freed: list[int]) -> None:
        """Who takes one of these pages reads all of it, with weight 0 what it has not written: see `KVCache._forget`."""
        if freed:
            for pool in self.pools:
                pool.zero_values(freed, self.table.page_size)
