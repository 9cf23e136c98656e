"""Which row holds which page: the bookkeeping, checked against a naive model that identifies pages
by their contents."""
import copy
import random

import pytest

from common.errors import UserError
from engine.pages.page_table import OutOfPages, PageTable

N_ROWS = 4


class Pages:
    """Rows write, adopt, move and release at random. `text[r]` is what row r wrote; `memory` is the
    contents of the pages. If two rows could write to one page, a text would no longer match its
    pages."""

    def __init__(self, draw):
        n_pages, page_size = draw.randint(1, 14), draw.choice([1, 2, 3, 7])
        self.draw, self.table = draw, PageTable(N_ROWS, n_pages, page_size)
        self.table.reclaim = self.reclaim
        self.memory = [[None] * page_size for _ in range(n_pages)]
        self.text = [[] for _ in range(N_ROWS)]
        self.reserved = [0] * N_ROWS  # positions that a row has pages for, beyond its text
        self.count = 0

    def holders(self, page):
        return sum(page in pages for pages in self.table.rows) + (page in self.table.pinned)

    def free(self):
        return [page for page in range(self.table.n_pages) if not self.holders(page)]

    def idle(self):
        held = set(sum(self.table.rows, []))
        return sorted(self.table.pinned - held)

    def reclaim(self, n):
        for page in self.idle()[:n]:
            assert self.table.unpin(page)

    def append(self, row):
        n, text, table = self.draw.randint(0, 12), self.text[row], self.table
        length, rows = len(text) + n + self.draw.choice([0, 0, 0, 1, 5]), copy.deepcopy(table.rows)
        needed, available, free = table.pages_needed(row, length), table.n_available, self.free()
        if needed > available:
            with pytest.raises(OutOfPages, match=f'row {row} needs {needed} .* {available} of'):
                table.extend(row, length)
            assert table.rows == rows and self.free() == free
            return
        free += self.idle()[:max(0, needed - len(free))]
        table.extend(row, length)
        rows[row] += sorted(free)[:needed]  # the lowest ones, in whatever order pages were freed
        assert table.rows == rows
        self.reserved[row] = max(self.reserved[row], length)
        for position in range(len(text), len(text) + n):
            place, offset = divmod(position, table.page_size)
            assert table.refs[rows[row][place]] == 1
            self.count += 1
            self.memory[rows[row][place]][offset] = self.count
            text.append(self.count)

    def keep(self, row):
        """Only full pages: a row may still write to another."""
        n_full = len(self.text[row]) // self.table.page_size
        if n_full:
            self.table.pin(self.table.rows[row][self.draw.randrange(n_full)])

    def let_go(self, row):
        if self.table.pinned:
            page = self.draw.choice(sorted(self.table.pinned))
            assert self.table.unpin(page) == (not self.holders(page))

    def adopt(self, row):
        """An empty row takes over a kept page, like a row with the same beginning would."""
        if self.table.rows[row]:
            with pytest.raises(UserError, match=f'row {row} .*release'):
                self.table.adopt(row, [0])
        elif self.table.pinned:
            page = self.draw.choice(sorted(self.table.pinned))
            self.table.adopt(row, [page])
            self.text[row], self.reserved[row] = list(self.memory[page]), self.table.page_size

    def move(self, source):
        to, pages = self.draw.randrange(N_ROWS), self.table.rows[source]
        free = self.free()
        freed = self.table.move(source, to)
        assert sorted(free + freed) == self.free() and self.table.rows[to] == pages
        if source != to:
            self.text[to], self.text[source] = self.text[source], []
            self.reserved[to], self.reserved[source] = self.reserved[source], 0

    def release(self, row):
        free = self.free()
        assert sorted(free + self.table.release(row)) == self.free()
        self.text[row], self.reserved[row] = [], 0

    def check(self):
        table = self.table
        assert table.refs == [self.holders(page) for page in range(table.n_pages)]
        assert sorted(table._free) == self.free() and table.n_free == len(self.free())
        assert table.n_evictable == len(self.idle())
        for pages, text, reserved in zip(table.rows, self.text, self.reserved, strict=True):
            assert len(set(pages)) == len(pages) == table.pages_for(reserved)
            assert [token for page in pages for token in self.memory[page]][:len(text)] == text


def test_every_row_finds_in_its_pages_what_it_wrote():
    for seed in range(300):
        draw = random.Random(seed)
        pages = Pages(draw)
        for _ in range(30):
            act = draw.choice([pages.append, pages.append, pages.append, pages.keep, pages.let_go,
                               pages.adopt, pages.move, pages.release])
            act(draw.randrange(N_ROWS))
            pages.check()


@pytest.mark.parametrize('sizes', [(0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 4, -1)])
def test_a_table_of_nothing_is_refused(sizes):
    with pytest.raises(UserError, match='n_rows=.*n_pages=.*page_size='):
        PageTable(*sizes)
