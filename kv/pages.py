"""Who holds which page: the bookkeeping of paged global slots. Pure Python, no tensors here.

    page_size = 4       row 0 holds 6 tokens   pages [0, 1]      page  0 1 2 3 4 5
                        row 1 holds 5 tokens   pages [2, 4]      refs  1 1 1 0 1 0

One table serves all global slots: they grow alike, so page 4 of every slot's pool belongs to the same row and positions.
The idea is PagedAttention's (Kwon et al. 2023, vLLM): a short conversation holds few bytes, and rows that begin alike hold
those pages once. A page with several holders is copied before one of them writes to it.
"""
import heapq
from collections import Counter

from config.errors import UserError


class OutOfPages(UserError):
    """The pool has fewer free pages than are needed."""


class PageTable:
    """The pages of `n_rows` rows, out of a pool of `n_pages`, each of `page_size` positions.

    rows[r]: the pages of row r, in the order of its positions. refs[p]: rows that hold page p; 0 = free.
    version: changes whenever a row's pages do, so that what was made from the table can be kept until then.
    """

    def __init__(self, n_rows: int, n_pages: int, page_size: int):
        if min(n_rows, n_pages, page_size) < 1:
            raise UserError(f'n_rows={n_rows}, n_pages={n_pages}, page_size={page_size}: all must be at least 1')
        self.n_pages, self.page_size = n_pages, page_size
        self.rows = [[] for _ in range(n_rows)]
        self.refs = [0] * n_pages
        self._free = list(range(n_pages))  # a heap: the lowest page first, so that what is held stays close together
        self.version = 0

    @property
    def n_free(self) -> int:
        return len(self._free)

    def pages_for(self, n_tokens: int) -> int:
        """Pages that a row of `n_tokens` holds."""
        return -(-n_tokens // self.page_size)

    def missing(self, jobs: list[tuple[int, int, int]]) -> int:
        """Free pages that `extend(row, held, length)` takes for all of `jobs`, one after another, each of another row."""
        new = sum(max(0, self.pages_for(length) - len(self.rows[row])) for row, held, length in jobs)
        writers = Counter(self.rows[row][place] for row, held, length in jobs for place in self._shared(row, held, length))
        # of those who hold a page, the last to write to it need not copy it
        return new + sum(min(n, self.refs[page] - 1) for page, n in writers.items())

    def extend(self, row: int, held: int, length: int) -> list[tuple[int, int]]:
        """Give `row`, which holds `held` tokens, pages of its own for positions held .. length - 1.

        Returns:
            (from, to) of each page whose contents must be copied, because another row holds it too.
        Raises:
            OutOfPages: and nothing has changed.
        """
        needed = self.missing([(row, held, length)])
        if needed > self.n_free:
            raise OutOfPages(f'row {row} needs {needed} more pages of {self.page_size} positions to hold {length} tokens: '
                             f'{self.n_free} of {self.n_pages} are free')
        if not needed:
            return []
        pages, copies = self.rows[row], []
        for place in self._shared(row, held, length):
            new = self._take()
            copies.append((pages[place], new))
            self._drop(pages[place])
            pages[place] = new
        pages += [self._take() for _ in range(self.pages_for(length) - len(pages))]
        self.version += 1
        return copies

    def fork(self, source: int, target: int) -> None:
        """`target` holds what `source` holds, page by page the same. It must hold nothing."""
        if self.rows[target]:
            raise UserError(f'fork: row {target} holds {len(self.rows[target])} pages; release it first')
        for page in self.rows[source]:
            self.refs[page] += 1
        self.rows[target] = list(self.rows[source])
        self.version += 1

    def move(self, source: int, target: int) -> list[int]:
        """What `source` holds belongs to `target`, whose own pages are released. Returns those that are free now."""
        if source == target:
            return []
        freed = self.release(target)
        self.rows[source], self.rows[target] = [], self.rows[source]
        self.version += 1
        return freed

    def release(self, row: int) -> list[int]:
        """`row` holds nothing; pages that nobody else holds are free again. Returns these."""
        pages, self.rows[row] = self.rows[row], []
        for page in pages:
            self._drop(page)
        self.version += 1
        return [page for page in pages if not self.refs[page]]

    def _shared(self, row, held, length) -> list[int]:
        """Places in the row's list of pages that will be written and that others hold too."""
        if length <= held:
            return []
        pages = self.rows[row]
        return [place for place in range(held // self.page_size, min(self.pages_for(length), len(pages)))
                if self.refs[pages[place]] > 1]

    def _take(self) -> int:
        page = heapq.heappop(self._free)
        self.refs[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self.refs[page] -= 1
        if self.refs[page] == 0:
            heapq.heappush(self._free, page)
