"""Who holds which page: the bookkeeping of paged global slots. Pure Python, no tensors here.

    page_size = 4       row 0 holds 6 tokens   pages [0, 1]      page  0 1 2 3 4 5
                        row 1 holds 5 tokens   pages [2, 4]      refs  1 1 1 0 1 0

Beside rows, a prefix store (`engine.prefix`) may keep pages: what a row has written stays there for
others that begin alike. A page that is only kept is *idle*: when free ones run out, the store gives
idle ones back (`reclaim`).

One table serves all global slots: they grow alike, so page 4 of every slot's pool belongs to the
same row and positions. The idea is PagedAttention's (Kwon et al. 2023, vLLM): a short conversation
holds few bytes, and rows that begin alike hold those pages once. A page with several holders is
copied before one of them writes to it.
"""
import heapq
from collections import Counter

from config.errors import UserError


class OutOfPages(UserError):
    """The pool has fewer free pages than are needed."""


class PageTable:
    """The pages of `n_rows` rows, out of a pool of `n_pages`, each of `page_size` positions.

    rows[r]: the pages of row r, in the order of its positions. refs[p]: rows that hold page p, and
    one more where it is kept; 0 = free. kept: pages that a store keeps. reclaim: called with a
    number of pages that it is to free, of the idle ones. version: grows whenever a row's pages
    change; versions[r]: the version in which those of row r last did. So what was made from the
    table can be kept until then.
    """

    def __init__(self, n_rows: int, n_pages: int, page_size: int):
        if min(n_rows, n_pages, page_size) < 1:
            raise UserError(f'n_rows={n_rows}, n_pages={n_pages}, page_size={page_size}: '
                            'all must be at least 1')
        self.n_pages, self.page_size = n_pages, page_size
        self.rows = [[] for _ in range(n_rows)]
        self.refs = [0] * n_pages
        # a heap: the lowest page first, so that what is held stays close together
        self._free = list(range(n_pages))
        self.kept, self.n_idle, self.reclaim = set(), 0, None
        self.version, self.versions = 0, [0] * n_rows

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_available(self) -> int:
        """Pages that can be taken: free ones, and idle ones, which are given back for it."""
        return len(self._free) + self.n_idle

    def pages_for(self, n_tokens: int) -> int:
        """Pages that a row of `n_tokens` holds."""
        return -(-n_tokens // self.page_size)

    def missing(self, jobs: list[tuple[int, int, int]]) -> int:
        """Free pages that `extend(row, held, length)` takes for all of `jobs`, one after another,
        each of another row."""
        new = sum(max(0, self.pages_for(length) - len(self.rows[row])) for row, _, length in jobs)
        writers = Counter(self.rows[row][place] for row, held, length in jobs
                          for place in self._shared(row, held, length))
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
        self.make_free(needed, f'row {row} needs {needed} more pages of {self.page_size} positions '
                               f'to hold {length} tokens')
        if not needed:
            return []
        self._changes(row)
        pages, copies = self.rows[row], []
        for place in self._shared(row, held, length):
            new = self._take()
            copies.append((pages[place], new))
            self._drop(pages[place])
            pages[place] = new
        pages += [self._take() for _ in range(self.pages_for(length) - len(pages))]
        return copies

    def make_free(self, n: int, why: str) -> None:
        """At least n pages are free afterwards.

        Raises:
            OutOfPages: there are not so many, idle ones included; the message begins with `why`.
        """
        if n > self.n_available:
            raise OutOfPages(f'{why}: {self.n_available} of {self.n_pages} are free')
        if n > self.n_free:
            self.reclaim(n - self.n_free)

    def fork(self, source: int, target: int) -> None:
        """`target` holds what `source` holds, page by page the same. It must hold nothing."""
        self.adopt(target, self.rows[source])

    def adopt(self, row: int, pages: list[int]) -> None:
        """`row`, which must hold nothing, holds these pages too."""
        if self.rows[row]:
            raise UserError(f'row {row} holds {len(self.rows[row])} pages; release it first')
        for page in pages:
            self.n_idle -= page in self.kept and self.refs[page] == 1
            self.refs[page] += 1
        self._changes(row)
        self.rows[row] = list(pages)

    # -- pages that a store keeps ------------------------------------------------------------------

    def keep(self, page: int) -> None:
        """A page that some row holds stays when the row leaves."""
        if page not in self.kept:
            self.kept.add(page)
            self.refs[page] += 1

    def take_kept(self) -> int:
        """A free page, kept from now on, and idle."""
        page = self._take()
        self.kept.add(page)
        self.n_idle += 1
        return page

    def let_go(self, page: int) -> bool:
        """No longer keep a page; whether it is free now."""
        self.kept.remove(page)
        self.n_idle -= self.refs[page] == 1
        self._drop(page)
        return not self.refs[page]

    def move(self, source: int, target: int) -> list[int]:
        """What `source` holds belongs to `target`, whose own pages are released. Returns those that
        are free now."""
        if source == target:
            return []
        freed = self.release(target)
        self._changes(source)
        self.rows[source], self.rows[target] = [], self.rows[source]
        return freed

    def release(self, row: int) -> list[int]:
        """`row` holds nothing; pages that nobody else holds are free again. Returns these."""
        self._changes(row)
        pages, self.rows[row] = self.rows[row], []
        for page in pages:
            self._drop(page)
        return [page for page in pages if not self.refs[page]]

    def rebuild(self, kept: set[int]) -> None:
        """After a fault midway: references and free pages as rows and `kept` say."""
        self.kept, self.refs = set(kept), [0] * self.n_pages
        for page in [*kept, *(page for pages in self.rows for page in pages)]:
            self.refs[page] += 1
        self._free = [page for page, n in enumerate(self.refs) if not n]
        self.n_idle = sum(self.refs[page] == 1 for page in kept)
        self.version += 1

    def _changes(self, row: int) -> None:
        """Called before its pages do, so that a change that is interrupted counts too."""
        self.version += 1
        self.versions[row] = self.version

    def _shared(self, row, held, length) -> list[int]:
        """Places in the row's list of pages that will be written and that others hold too."""
        if length <= held:
            return []
        pages = self.rows[row]
        written = range(held // self.page_size, min(self.pages_for(length), len(pages)))
        return [place for place in written if self.refs[pages[place]] > 1]

    def _take(self) -> int:
        page = heapq.heappop(self._free)
        self.refs[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self.refs[page] -= 1
        if self.refs[page] == 0:
            heapq.heappush(self._free, page)
        self.n_idle += self.refs[page] == 1 and page in self.kept
