"""What the row of a request holds between two steps, for whoever shows it. Pure Python."""
import time
from dataclasses import dataclass

from engine.pages.page_table import page_nbytes, rows_nbytes


@dataclass(frozen=True)
class RowView:
    """The row of a request in a `PagedKVCache`, and the load of its engine.

    row, length: number of the row and its positions; -1 and 0 after a preemption, until it has a
        row again. cached: prompt tokens found in the prefix cache; -1 = not looked up.
    pages: of the global slots, in order: (page, number of users, whether the prefix cache is one).
    nbytes: of the row's rings, states and pages, shared or not. free_pages: held by nobody.
    done: the request ended in this step; its row is about to be freed.
    taken, first_token: `perf_counter` times. first_token: None before the first token.
    """
    row: int
    length: int
    cached: int
    pages: tuple[tuple[int, int, bool], ...]
    nbytes: int
    running: int
    waiting: int
    free_pages: int
    held_nbytes: int
    prefix_nbytes: int
    done: bool
    taken: float
    first_token: float | None


def view_of(request, scheduler, done: bool) -> RowView | None:
    """View the row of a request. None: the request has not had a row yet."""
    if request.row < 0 and not request.preempted:
        return None
    cache, row, length, pages = scheduler.cache, request.row, 0, ()
    table, nbytes = cache.table, 0
    if row >= 0:
        length = cache.length(row)
        pages = tuple((p, table.refs[p], p in table.pinned) for p in table.rows[row])
        nbytes = (rows_nbytes(cache.plan, 1, cache.max_seq_len, cache.kv_dtype)
                  + len(pages) * page_nbytes(cache.plan, table.page_size, cache.kv_dtype))
    prefix = scheduler.prefix
    return RowView(row, length, request.num_cached_tokens, pages, nbytes,
                   len(scheduler.running), len(scheduler.waiting), table.n_free, cache.held_nbytes,
                   prefix.nbytes if prefix else 0, done, time.perf_counter(),
                   request.first_token)
