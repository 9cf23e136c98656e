"""Decode attention over pages: partial softmaxes are computed page by page, in place, and those
of each row are merged (flash-decoding's split KV, Dao et al. 2023, with the pages of PagedAttention
as splits)."""
from dataclasses import dataclass

import torch

from attention.cached import TILE, PartialSoftmax, scores_dtype, tile_scores

# Maximum ratio of unowned to owned pages in a slice of the pool; above it, pages are gathered.
MAX_UNOWNED = 0.25


@dataclass
class PageList:
    """The pages that the rows of a one-token step attend to.

    Entry e: page ids[e] holds positions first[e] .. first[e] + page_size - 1 of batch row rows[e].
    Entries are in the order of the pool. Each of `runs` is (a, b, lo): entries a .. b - 1 are
    consecutive pages from lo on, or arbitrary pages if lo is None. An unowned page within a run is
    assigned to row B, whose result is dropped, so its contents (even NaN) affect no row.

    rows, first, ids: (n,) int64. kv_lens: (B + 1,) int64, number of keys per row; 0 for row B.
    """
    ids: torch.Tensor
    rows: torch.Tensor
    first: torch.Tensor
    kv_lens: torch.Tensor
    runs: list[tuple[int, int, int | None]]


def page_entries(table, rows: list[int | None]):
    """([(page, batch row, first position)] in the order of the pool, runs), see `PageList`. For a
    shared page, the entries of the second and later rows come last. None = a row without keys."""
    entries = sorted((page, b, place * table.page_size)
                     for b, row in enumerate(rows) if row is not None
                     for place, page in enumerate(table.rows[row]))
    first_owners, sharers = [], []
    for entry in entries:
        shared = first_owners and first_owners[-1][0] == entry[0]
        (sharers if shared else first_owners).append(entry)
    if not first_owners:
        return [], []
    ordered, runs = first_owners, [(0, len(first_owners), None)]
    lo, hi = first_owners[0][0], first_owners[-1][0] + 1
    if hi - lo <= (1 + MAX_UNOWNED) * len(first_owners):  # one slice of the pool
        owned = {entry[0]: entry for entry in first_owners}
        ordered = [owned.get(page, (page, len(rows), 0)) for page in range(lo, hi)]
        runs = [(0, hi - lo, lo)]
    if sharers:
        runs.append((len(ordered), len(ordered) + len(sharers), None))
    return ordered + sharers, runs


def paged_attention(q, pool, pages: PageList, sink=None):
    """Attention of one new token per row over the pages of the row.

    q: (B, H, 1, D). pool: (k, v) or (k, v, k_scale, v_scale), (n_pages, Hkv, page_size, D or 1;
    int4: D / 2).
    sink: (H,) logits of `cached_attention`, or None. Returns (B, H, 1, D); zeros for empty rows.
    """
    n_kv_head = pool[0].size(1)
    if not pages.runs:
        return torch.zeros_like(q)
    dtype = scores_dtype(q.dtype)
    rows = q.reshape(q.size(0), n_kv_head, -1, q.size(-1)).to(dtype)       # (B, Hkv, G, D)
    rows = rows * q.size(-1) ** -0.5
    rows = torch.cat([rows, torch.zeros_like(rows[:1])])                   # row B: unowned pages
    parts = [_attend_pages(rows, pool, pages, *piece) for piece in _pieces(pool, pages, rows)]
    top, total, values = (torch.cat(x) for x in zip(*parts))               # (entries, Hkv, G, ...)
    highest = torch.full_like(rows[..., :1], torch.finfo(dtype).min).scatter_reduce_(
        0, pages.rows.view(-1, 1, 1, 1).expand_as(top), top, 'amax')
    weight = (top - highest[pages.rows]).exp_()                            # (entries, Hkv, G, 1)
    total = torch.zeros_like(highest).index_add_(0, pages.rows, total * weight)
    values = torch.zeros_like(rows).index_add_(0, pages.rows, values * weight)
    if sink is not None:
        total += (sink.to(dtype).view(n_kv_head, -1, 1) - highest).exp_()
    y = (values / total.clamp(min=torch.finfo(dtype).tiny))[:-1]
    return y.to(q.dtype).reshape(q.shape)


def _pieces(pool, pages, rows):
    """Yield (first entry, end, index into the pool), about a tile each. The index is a slice if
    pages are consecutive, so that nothing is copied, and otherwise a tensor."""
    n_kv_head, page_size = pool[0].shape[1:3]
    in_place = pool[0].dtype == rows.dtype  # no conversion, so tiles need no extra memory
    most = max(1, TILE // (n_kv_head * page_size * rows.size(-1)))  # int4 is stored as D / 2
    for a, b, lo in pages.runs:
        size = b - a if lo is not None and in_place else most
        for first in range(a, b, size):
            end = min(first + size, b)
            where = pages.ids[first:end] if lo is None else slice(lo + first - a, lo + end - a)
            yield first, end, where


def _attend_pages(rows, pool, pages, first, end, where) -> PartialSoftmax:
    """Partial softmax of each of entries first .. end - 1: (end - first, Hkv, G, ...)."""
    k, v, k_scale, v_scale = (*(x[where] for x in pool), None, None)[:4]
    row, start = pages.rows[first:end], pages.first[first:end]
    scores = tile_scores(rows[row], k, k_scale)                            # (entries, Hkv, G, s)
    n_keys = (pages.kv_lens[row] - start)[:, None]
    seen = torch.arange(scores.size(-1), device=rows.device) < n_keys
    scores.masked_fill_(~seen[:, None, None], torch.finfo(rows.dtype).min)
    return PartialSoftmax.of(scores, v, v_scale)
