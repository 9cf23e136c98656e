"""Page bookkeeping of the paged global slots. Pure Python, no tensors.

    page_size = 4       row 0 has 6 tokens     pages [0, 1]      page  0 1 2 3 4 5
                        row 1 has 5 tokens     pages [2, 4]      refs  1 1 1 0 1 0

One table serves all global slots. Rows with a common prefix share its complete pages, which no row
writes to (PagedAttention, Kwon et al. 2023). A prefix store may pin pages: a pinned page in no row
is *evictable*; the store unpins some when too few are free (`reclaim`).
"""
import heapq

from common.errors import UserError
from kv.plan import GLOBAL, KVPlan


class OutOfPages(UserError):
    """The pool has fewer free pages than are needed."""


def page_nbytes(plan: KVPlan, page_size: int, kv_dtype: str) -> int:
    """Bytes of a page: `page_size` positions in every global slot."""
    return sum(slot.capacity(page_size) * slot.position_nbytes(kv_dtype) for slot in plan.slots
               if slot.kind == GLOBAL)


def rows_nbytes(plan: KVPlan, rows: int, max_seq_len: int, kv_dtype: str) -> int:
    """Bytes of what is not in pages: local slots, and the states of global ones."""
    return rows * sum(slot.state_nbytes(kv_dtype) if slot.kind == GLOBAL else
                      slot.nbytes(1, max_seq_len, kv_dtype) for slot in plan.slots)


def pages_within(budget: int, plan: KVPlan, rows: int, max_seq_len: int, page_size: int,
                 kv_dtype: str) -> int:
    """Number of pages that `budget` bytes hold beside what is not in pages, at most what all rows
    can take; budget 0 = that. Raises UserError if they hold none."""
    full, page = rows * -(-max_seq_len // page_size), page_nbytes(plan, page_size, kv_dtype)
    rings = rows_nbytes(plan, rows, max_seq_len, kv_dtype)
    if budget and budget < rings + page:
        raise UserError(f'kv_budget={budget:,} bytes: the windows of max_batch_size={rows} '
                        f'rows take {rings:,} and a page of {page_size} positions {page:,}: '
                        f'give at least {rings + page:,}, or fewer rows')
    return min(full, (budget - rings) // page) if budget and page else full


class PageTable:
    """The pages of `n_rows` rows, from a pool of `n_pages` pages of `page_size` positions.

    rows[r]: the pages of row r, in the order of its positions.
    refs[p]: number of rows with page p, plus one if it is pinned; 0 = free.
    reclaim: called with the number of evictable pages that it must unpin.
    version: incremented whenever the pages of a row change; versions[r]: its value when row r last
    changed. Anything derived from the table stays valid until then.
    """

    def __init__(self, n_rows: int, n_pages: int, page_size: int):
        if min(n_rows, n_pages, page_size) < 1:
            raise UserError(f'n_rows={n_rows}, n_pages={n_pages}, page_size={page_size}: '
                            'all must be at least 1')
        self.n_pages, self.page_size = n_pages, page_size
        self.rows = [[] for _ in range(n_rows)]
        self.refs = [0] * n_pages
        # a heap: the lowest page is taken first, which keeps used pages close together
        self._free = list(range(n_pages))
        self.pinned, self.n_evictable, self.reclaim = set(), 0, None
        self.version, self.versions = 0, [0] * n_rows

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_available(self) -> int:
        """Number of pages that can be taken: free plus evictable."""
        return len(self._free) + self.n_evictable

    def pages_for(self, n_tokens: int) -> int:
        """Number of pages that `n_tokens` tokens need."""
        return -(-n_tokens // self.page_size)

    def pages_needed(self, row: int, end: int) -> int:
        """Number of pages that `extend` takes."""
        return max(0, self.pages_for(end) - len(self.rows[row]))

    def extend(self, row: int, end: int) -> None:
        """Give `row` pages for its first `end` positions. Raises OutOfPages, in which case nothing
        changes."""
        needed = self.pages_needed(row, end)
        if needed:
            self.ensure_free(needed, f'row {row} needs {needed} more pages of {self.page_size} '
                                     f'positions to hold {end} tokens')
            self._mark_changed(row)
            self.rows[row] += [self._take() for _ in range(needed)]

    def ensure_free(self, n: int, why: str) -> None:
        """Reclaim evictable pages until n are free. Raises OutOfPages if there are too few; the
        message begins with `why`."""
        if n > self.n_available:
            raise OutOfPages(f'{why}: {self.n_available} of {self.n_pages} are free')
        if n > self.n_free:
            self.reclaim(n - self.n_free)

    def adopt(self, row: int, pages: list[int]) -> None:
        """Give shared use of these pages to `row`, which must be empty."""
        if self.rows[row]:
            raise UserError(f'row {row} holds {len(self.rows[row])} pages; release it first')
        for page in pages:
            self.n_evictable -= page in self.pinned and self.refs[page] == 1
            self.refs[page] += 1
        self._mark_changed(row)
        self.rows[row] = list(pages)

    def move(self, source: int, target: int) -> list[int]:
        """Move the pages of `source` to `target`, after releasing those of `target`. Returns the
        pages that this frees."""
        if source == target:
            return []
        freed = self.release(target)
        self._mark_changed(source)
        self.rows[source], self.rows[target] = [], self.rows[source]
        return freed

    def release(self, row: int) -> list[int]:
        """Empty `row`. Returns the pages that this frees."""
        self._mark_changed(row)
        pages, self.rows[row] = self.rows[row], []
        for page in pages:
            self._unref(page)
        return [page for page in pages if not self.refs[page]]

    def pin(self, page: int) -> None:
        """Keep a page of a row from being freed when the row is released."""
        if page not in self.pinned:
            self.pinned.add(page)
            self.refs[page] += 1

    def take_pinned(self) -> int:
        """Take a free page and pin it."""
        page = self._take()
        self.pinned.add(page)
        self.n_evictable += 1
        return page

    def unpin(self, page: int) -> bool:
        """Unpin a page. Returns whether it is free now."""
        self.pinned.remove(page)
        self.n_evictable -= self.refs[page] == 1
        self._unref(page)
        return not self.refs[page]

    def rebuild(self, pinned: set[int]) -> None:
        """After an error, recompute references and free pages from the rows and `pinned`."""
        self.pinned, self.refs = set(pinned), [0] * self.n_pages
        for page in [*pinned, *(page for pages in self.rows for page in pages)]:
            self.refs[page] += 1
        self._free = [page for page, n in enumerate(self.refs) if not n]
        self.n_evictable = sum(self.refs[page] == 1 for page in pinned)
        self.version += 1

    def _mark_changed(self, row: int) -> None:
        """Called before the change, so that an interrupted change counts too."""
        self.version += 1
        self.versions[row] = self.version

    def _take(self) -> int:
        page = heapq.heappop(self._free)
        self.refs[page] = 1
        return page

    def _unref(self, page: int) -> None:
        self.refs[page] -= 1
        if self.refs[page] == 0:
            heapq.heappush(self._free, page)
        self.n_evictable += self.refs[page] == 1 and page in self.pinned
