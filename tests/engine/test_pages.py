"""Which row holds which page: the bookkeeping, checked against a naive model that identifies pages
by their contents."""
import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from config.errors import UserError
from engine.pages.table import OutOfPages, PageTable

N_ROWS = 4
ROW = st.integers(0, N_ROWS - 1)


class Pages(RuleBasedStateMachine):
    """Rows write, adopt, move and release at random. `text[r]` is what row r wrote; `memory` is the
    contents of the pages. If two rows could write to one page, a text would no longer match its
    pages."""

    @initialize(n_pages=st.integers(1, 14), page_size=st.sampled_from([1, 2, 3, 7]))
    def start(self, n_pages, page_size):
        self.table = PageTable(N_ROWS, n_pages, page_size)
        self.table.reclaim = self.reclaim
        self.memory = [[None] * page_size for _ in range(n_pages)]
        self.text = [[] for _ in range(N_ROWS)]
        self.reserved = [0] * N_ROWS  # positions that a row has pages for, beyond its text
        self.count = 0
        self.seen = {}                # version -> rows at that version

    # -- rules -------------------------------------------------------------------------------------

    def state(self):
        return copy.deepcopy((self.table.rows, self.table.refs, sorted(self.table._free),
                              self.table.pinned, self.table.version))

    def free(self):
        return [page for page in range(self.table.n_pages) if not self.holders(page)]

    def holders(self, page):
        return sum(page in pages for pages in self.table.rows) + (page in self.table.pinned)

    def idle(self):
        return sorted(page for page in self.table.pinned
                      if not any(page in pages for pages in self.table.rows))

    def reclaim(self, n):
        for page in self.idle()[:n]:
            assert self.table.unpin(page)

    def extend(self, row, length):
        """`PageTable.extend` as a cache uses it."""
        before, free = copy.deepcopy(self.table.rows), self.free()
        needed = self.table.pages_needed(row, length)
        free += self.idle()[:max(0, needed - len(free))]
        self.table.extend(row, length)
        # the lowest ones, in whatever order pages were freed
        assert self.table.rows[row] == before[row] + sorted(free)[:needed]
        assert all(self.table.rows[r] == before[r] for r in range(N_ROWS) if r != row)
        self.reserved[row] = max(self.reserved[row], length)
        assert len(self.table.rows[row]) == self.table.pages_for(self.reserved[row])

    def write(self, row, n):
        for position in range(len(self.text[row]), len(self.text[row]) + n):
            self.count += 1
            place, offset = divmod(position, self.table.page_size)
            page = self.table.rows[row][place]
            assert self.table.refs[page] == 1
            self.memory[page][offset] = self.count
            self.text[row].append(self.count)

    @rule(row=ROW, n=st.integers(0, 12), ahead=st.sampled_from([0, 0, 0, 1, 5]))
    def append(self, row, n, ahead):
        length, before = len(self.text[row]) + n + ahead, self.state()
        needed, available = self.table.pages_needed(row, length), self.table.n_available
        if needed <= available:
            self.extend(row, length)
            self.write(row, n)
            return
        with pytest.raises(OutOfPages, match=f'row {row} needs {needed} .* {available} of'):
            self.table.extend(row, length)
        assert self.state() == before

    @rule(row=ROW, place=st.integers(0, 3))
    def keep(self, row, place):
        """Only full pages: a row may still write to another."""
        if place < len(self.text[row]) // self.table.page_size:
            self.table.pin(self.table.rows[row][place])

    @rule(pick=st.integers(0, 20))
    def let_go(self, pick):
        if self.table.pinned:
            page = sorted(self.table.pinned)[pick % len(self.table.pinned)]
            assert self.table.unpin(page) == (not self.holders(page))

    @rule(row=ROW, pick=st.integers(0, 20))
    def adopt(self, row, pick):
        """An empty row takes over a kept page, like a row with the same beginning would."""
        if self.table.rows[row]:
            before = self.state()
            with pytest.raises(UserError, match=f'row {row} .*release'):
                self.table.adopt(row, [0])
            assert self.state() == before
        elif self.table.pinned:
            page = sorted(self.table.pinned)[pick % len(self.table.pinned)]
            self.table.adopt(row, [page])
            self.text[row], self.reserved[row] = list(self.memory[page]), self.table.page_size

    @precondition(lambda self: self.table.n_free)
    @rule()
    def take_kept(self):
        page = self.table.take_pinned()
        self.memory[page] = [-1] * self.table.page_size

    @rule()
    def rebuild(self):
        before, state = self.table.n_evictable, self.state()
        self.table.refs = [7] * self.table.n_pages
        self.table.rebuild(set(self.table.pinned))
        assert self.table.n_evictable == before and self.state()[:4] == state[:4]
        assert self.table.version > state[4]

    @rule(source=ROW, to=ROW)
    def move(self, source, to):
        before, held = self.table.rows[source], set(sum(self.table.rows, []))
        freed = self.table.move(source, to)
        assert sorted(freed) == sorted(held - set(sum(self.table.rows, [])) - self.table.pinned)
        assert self.table.rows[to] == before
        if source != to:
            self.text[to], self.text[source] = self.text[source], []
            self.reserved[to], self.reserved[source] = self.reserved[source], 0

    @rule(row=ROW)
    def release(self, row):
        held = set(sum(self.table.rows, []))
        freed = self.table.release(row)
        assert sorted(freed) == sorted(held - set(sum(self.table.rows, [])) - self.table.pinned)
        assert self.table.rows[row] == []
        self.text[row], self.reserved[row] = [], 0

    # -- invariants --------------------------------------------------------------------------------

    @invariant()
    def a_page_is_free_or_held_by_as_many_rows_as_it_has_references(self):
        assert self.table.refs == [self.holders(page) for page in range(self.table.n_pages)]
        assert sorted(self.table._free) == self.free()
        assert self.table.n_free == len(self.free()) and self.table.n_evictable == len(self.idle())

    @invariant()
    def a_row_holds_each_page_once_and_as_many_as_it_needs(self):
        for row, pages in enumerate(self.table.rows):
            assert len(set(pages)) == len(pages) == self.table.pages_for(self.reserved[row])
            assert len(self.text[row]) <= self.reserved[row] or not self.text[row]

    @invariant()
    def every_row_finds_in_its_pages_what_it_wrote(self):
        for pages, text in zip(self.table.rows, self.text):
            assert [token for page in pages for token in self.memory[page]][:len(text)] == text

    @invariant()
    def a_version_stands_for_one_state_of_the_rows(self):
        seen = self.seen.setdefault(self.table.version, copy.deepcopy(self.table.rows))
        assert seen == self.table.rows


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=150, stateful_step_count=30)


@pytest.mark.parametrize('sizes', [(0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 4, -1)])
def test_a_table_of_nothing_is_refused(sizes):
    with pytest.raises(UserError, match='n_rows=.*n_pages=.*page_size='):
        PageTable(*sizes)
