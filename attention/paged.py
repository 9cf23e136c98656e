"""Decode over pages: each page is a part of its row's attention, computed where it lies in the pool, and the parts of a
row are joined by their log-sum-exp (flash-decoding's split KV, Dao et al. 2023, with PagedAttention's pages as splits)."""
import torch

from attention.heads import fold_heads, unfold_heads
from attention.softmax import PartialSoftmax, scores_dtype, tile_scores
from kv.view import TILE, KVView, Tile


def paged_attention(q, view: KVView) -> torch.Tensor:
    """One new token per row over the pages that its row holds.

    q: (B, H, 1, D); view: with `pages`. Returns (B, H, 1, D); of rows that hold nothing, zeros.
    """
    pages, n_kv_head = view.pages, view.k[0].size(1)
    if not pages.runs:
        return torch.zeros_like(q)
    dtype = scores_dtype(q.dtype)
    rows = fold_heads(q, n_kv_head).to(dtype) * q.size(-1) ** -0.5         # (B, Hkv, G, D)
    rows = torch.cat([rows, torch.zeros_like(rows[:1])])                   # pages of others belong to row B
    parts = [_attend_pages(rows, view, *piece) for piece in _pieces(view, dtype)]
    top, total, values = (torch.cat([getattr(p, name) for p in parts]) for name in ('top', 'total', 'values'))
    highest = torch.full_like(rows[..., :1], torch.finfo(dtype).min).scatter_reduce_(
        0, pages.rows.view(-1, 1, 1, 1).expand_as(top), top, 'amax')
    weight = (top - highest[pages.rows]).exp_()                            # (entries, Hkv, G, 1)
    total = torch.zeros_like(highest).index_add_(0, pages.rows, total * weight)
    values = torch.zeros_like(rows).index_add_(0, pages.rows, values * weight)
    y = (values / total.clamp(min=torch.finfo(dtype).tiny))[:-1]
    return unfold_heads(y.to(q.dtype), q.size(1))


def _pieces(view, dtype):
    """(first entry, last entry, what picks their pages out of the pool), of about a tile each: slices of the pool where
    the pages are neighbours in it, so that nothing is copied; index tensors elsewhere."""
    _, n_kv_head, page_size, D = view.k[0].shape
    stored = view.is_stored_as(dtype)
    most = max(1, TILE // (n_kv_head * page_size * D))
    for a, b, lo in view.pages.runs:
        size = b - a if lo is not None and stored else most                # as they lie in the pool, no tile is needed
        for first in range(a, b, size):
            last = min(first + size, b)
            yield first, last, view.pages.ids[first:last] if lo is None else slice(lo + first - a, lo + last - a)


def _attend_pages(rows, view, first, last, picked) -> PartialSoftmax:
    """Entries first .. last - 1, each by itself: parts of (last - first, Hkv, G, ...)."""
    pages, dtype = view.pages, rows.dtype
    k, v = (tuple(x[picked] for x in kv) for kv in (view.k, view.v))
    tile = Tile((first, last), (0, k[0].size(2)), k[0], v[0], *((k[1], v[1]) if len(k) == 2 else (None, None)))
    row, start = pages.rows[first:last], pages.first[first:last]
    scores = tile_scores(rows[row], tile, dtype)                           # (entries, Hkv, G, page_size)
    seen = torch.arange(scores.size(-1), device=rows.device) < (pages.lengths[row] - start)[:, None]
    return PartialSoftmax.of(scores.masked_fill_(~seen[:, None, None], torch.finfo(dtype).min), tile)
