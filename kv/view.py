"""What the queries of one step attend over, as attention gets it from a cache: stored K and V, still encoded."""
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from kv.quant import dequantize_int8

# Stored K or V: (values,) or, in int8, (values, scales); they share their first three dimensions.
Encoded = tuple[torch.Tensor, ...]

# Elements of K (and as many of V) that are decoded at a time: 1 MB of float32, which stays in a core's L2 cache.
TILE = 2 ** 18


def decode(x: Encoded, dtype: torch.dtype) -> torch.Tensor:
    """Stored K or V in `dtype` (a copy only where the dtypes differ)."""
    return dequantize_int8(*x, dtype) if len(x) == 2 else x[0].to(dtype)


@dataclass
class Tile:
    """A piece of a view: rows[0] to rows[1] of the step, and of their keys the indices keys[0] to keys[1].

    k, v: (b, Hkv, s, D) in the stored dtype. k_scale, v_scale: (b, Hkv, s, 1), or None where there are none.
    """
    rows: tuple[int, int]
    keys: tuple[int, int]
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


@dataclass
class PageList:
    """Where the keys of the rows of a step are in a pool of pages, for steps of one token.

    Entry e says: the page ids[e] holds positions first[e] .. first[e] + page_size - 1 of the step's row rows[e]. Pages
    stand in the order of the pool; `runs` are (a, b, lo): entries a to b are the pages from lo on, all of them; lo is None
    where they are any pages. A page of others within a run belongs to row B, which nobody reads: what it holds, NaN
    even, touches nobody.

    rows, first, ids: (n,) int64. lengths: (B + 1,) int64, keys that each row sees; 0 of row B.
    """
    ids: torch.Tensor
    rows: torch.Tensor
    first: torch.Tensor
    lengths: torch.Tensor
    runs: list[tuple[int, int, int | None]]


@dataclass
class KVView:
    """What the queries of one step attend over, for the owner of a slot and its readers alike.

    k, v: encoded, (B, Hkv, S, D); with `pages` or `table` the pools (n_pages, Hkv, page_size, D) that they point into.
    Which keys a query sees, as far as causality and window allow (at t = 1 of a slot the cache gives only keys in reach):
        (nothing)      all: they are in order and the last t are the queries' own; at t = 1 any order will do
        seen           (B,): the same of the first seen[b] of row b, so that its token j stands at seen[b] - t + j
        q_pos, k_pos   (B, t) and (B, S): the position of each query and key, negative for a key that is not there
        pages          those of a list of pages of the pools (t = 1)
    table: (B, n) int32, with `seen`: k and v are pools, and row b's keys lie in the pages table[b], in order; -1 = none.
    memo: shared by all slots of this kind in the step, for what attention makes from the tags (masks).
    """
    k: Encoded
    v: Encoded
    seen: torch.Tensor | None = None
    table: torch.Tensor | None = None
    q_pos: torch.Tensor | None = None
    k_pos: torch.Tensor | None = None
    pages: PageList | None = None
    memo: dict = field(default_factory=dict)

    def is_stored_as(self, dtype: torch.dtype) -> bool:
        """Whether K and V can be attended over as they lie, without a decoded copy."""
        return self.k[0].dtype == dtype

    def gathered(self) -> 'KVView':
        """The same with the pages of `table` copied together, (B, Hkv, n * page_size, D), as they are stored; zeros where a row
        has no page."""
        def gather(x):
            pages = x[self.table.clamp(min=0).long()]                          # (B, n, Hkv, page_size, D)
            return pages.masked_fill((self.table < 0)[..., None, None, None], 0).transpose(1, 2).flatten(2, 3)
        return replace(self, k=tuple(map(gather, self.k)), v=tuple(map(gather, self.v)), table=None)

    def decoded(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """All of K and V in `dtype`: for what is short (a window, a chunk)."""
        return decode(self.k, dtype), decode(self.v, dtype)

    def tiles(self, size: int = TILE) -> Iterator[Tile]:
        """Pieces of at most `size` elements of K (at least one position): whole rows where they fit, else parts of one
        row. So that a decoded copy of more than a tile never exists."""
        B, n_kv_head, S, D = self.k[0].shape
        n_keys = min(S, max(1, size // (n_kv_head * D)))
        n_rows = max(1, size // (n_kv_head * D * S)) if n_keys == S else 1
        for row in range(0, B, n_rows):
            for key in range(0, S, n_keys):
                rows, keys = (row, min(row + n_rows, B)), (key, min(key + n_keys, S))
                k, v = (tuple(x[slice(*rows), :, slice(*keys)] for x in kv) for kv in (self.k, self.v))
                yield Tile(rows, keys, k[0], v[0], *((k[1], v[1]) if len(k) == 2 else (None, None)))
