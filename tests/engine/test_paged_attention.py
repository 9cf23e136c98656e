"""Decode over pages, against dense attention of each row over its own keys in float64."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.cached import dequantize
from engine.pages.attention import MAX_UNOWNED, PageList, page_entries, paged_attention
from engine.pages.table import PageTable
from kv.quantize import quantize_int8
from tests.helpers.reference import dense_attention

HEADS = [(1, 1), (4, 4), (4, 2), (6, 1)]
D = 6


class Pool:
    """Rows in pages. Everything in the pool that the step must not read is NaN or inf: pages of
    other rows and free pages."""

    def __init__(self, lengths, page_size, n_pages, heads=(4, 2), dtype=torch.float64,
                 spoiled=torch.nan, extend=None):
        self.heads, self.page_size, self.lengths = heads, page_size, list(lengths)
        self.table = PageTable(len(lengths), n_pages, page_size)
        for row, n in extend or [(row, n) for row, n in enumerate(lengths)]:
            self.table.extend(row, 0, n)
        g = torch.Generator().manual_seed(0)
        self.k, self.v = (torch.randn(n_pages, heads[1], page_size, D, generator=g,
                                      dtype=torch.float64).to(dtype) * 1.4
                          for _ in 'kv')
        self.q = torch.randn(len(lengths), heads[0], 1, D, generator=g,
                             dtype=torch.float64).to(dtype) * 1.4
        self.spoiled = spoiled

    def listed(self, rows):
        entries, runs = page_entries(self.table,
                                     [row if self.lengths[row] else None for row in rows])
        columns = torch.tensor(entries, dtype=torch.int64).view(-1, 3).unbind(1)
        return PageList(*columns, torch.tensor([self.lengths[row] for row in rows] + [0]), runs)

    def attend(self, rows):
        """Attend with the given rows. With int8, the spoiled pages have NaN scales."""
        held = {page for row in rows for page in self.table.rows[row]}
        others = [page for page in range(self.table.n_pages) if page not in held]
        pool = self.stored()
        for x in pool:
            if x.is_floating_point():
                x[others] = self.spoiled
        return paged_attention(self.q[list(rows)], pool, self.listed(rows))

    def stored(self):
        return self.k.clone(), self.v.clone()

    def read(self):
        return self.k, self.v

    def alone(self, row):
        n, pages = self.lengths[row], self.table.rows[row]
        k, v = (x[pages].transpose(0, 1).flatten(1, 2)[None, :, :n] for x in self.read())
        return dense_attention(self.q[row:row + 1], k, v)

    def check(self, rows, bound=1e-12):
        y = self.attend(rows)
        assert y.shape == (len(rows), self.heads[0], 1, D) and y.dtype == self.q.dtype
        for b, row in enumerate(rows):
            expected = self.alone(row) if self.lengths[row] else torch.zeros(1, self.heads[0], 1, D)
            assert (y[b:b + 1].double() - expected).abs().max() < bound


class Int8Pool(Pool):

    def stored(self):
        (k, k_scale), (v, v_scale) = quantize_int8(self.k), quantize_int8(self.v)
        return k, v, k_scale, v_scale

    def read(self):
        k, v, k_scale, v_scale = self.stored()
        return dequantize(k, k_scale, torch.float64), dequantize(v, v_scale, torch.float64)


KINDS = pytest.mark.parametrize('kind', [Pool, Int8Pool], ids=['float64', 'int8'])


@KINDS
@settings(max_examples=60)
@given(data=st.data(), page_size=st.sampled_from([1, 2, 3, 7, 64]), heads=st.sampled_from(HEADS),
       spoiled=st.sampled_from([torch.nan, torch.inf]), tile=st.sampled_from([1, 50, 2 ** 18]))
def test_any_rows_over_any_pages(kind, data, page_size, heads, spoiled, tile):
    """Rows grow in turns, so that their pages interleave; some are empty, some share pages, some
    have reserved more pages."""
    batch = data.draw(st.integers(1, 5))
    pool = kind([0] * batch, page_size, 120, heads, spoiled=spoiled)
    for _ in range(data.draw(st.integers(1, 8))):
        row, n = data.draw(st.integers(0, batch - 1)), data.draw(st.integers(1, 9))
        reserved = data.draw(st.sampled_from([0, 0, 5]))
        pool.table.extend(row, pool.lengths[row], pool.lengths[row] + n + reserved)
        pool.lengths[row] += n
    source, target = data.draw(st.permutations(range(batch)))[:2] if batch > 1 else (0, 0)
    if not pool.lengths[target]:
        pool.table.adopt(target, pool.table.rows[source])
        pool.lengths[target] = pool.lengths[source]
    rows = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, unique=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('engine.pages.attention.TILE', tile)
        pool.check(rows)


@KINDS
@pytest.mark.parametrize('n_others, one_slice', [(1, True), (2, True), (3, False)])
def test_few_unowned_pages_are_read_over_and_many_skipped(kind, n_others, one_slice):
    """Row 0 has 8 pages, with row 1's pages in between."""
    pool = kind([16, 2 * n_others], 2, 20, extend=[(0, 6), (1, 2 * n_others)])
    pool.table.extend(0, 6, 16)
    assert (n_others <= MAX_UNOWNED * 8) == one_slice
    listed = pool.listed([0])
    assert listed.runs == ([(0, 8 + n_others, 0)] if one_slice else [(0, 8, None)])
    assert listed.ids.tolist() == [page for page in range(8 + n_others) if one_slice
                                   or page in pool.table.rows[0]]
    pool.check([0])


@pytest.mark.parametrize('dtype, bound',
                         [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_other_dtypes(dtype, bound):
    Pool([11, 3, 20], 4, 12, dtype=dtype).check([0, 1, 2], bound)


def test_large_scores_do_not_overflow():
    pool = Pool([11, 3, 20], 4, 12)
    pool.q *= 1e4
    pool.check([0, 1, 2], 1e-9)
