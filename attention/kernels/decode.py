"""Attention of a few new tokens over stored K and V: split over the keys, with all query heads of a
K/V head in one block.

Stored K and V are read once, as stored (int8 with its scales): decoded copies exist only in
registers. The keys of a row are split over several programs, whose results are merged by their
log-sum-exp (flash-decoding, Dao et al. 2023). The rows of a block are the query heads of one K/V
head times the new tokens, in any ratio: 12 heads over 1 fill 12 of 16 rows.

    program   split 0     split 1     split 2       a row of 11 keys, 3 splits of blocks of 2 keys
    keys      0 1 2 3     4 5 6 7     8 9 10        -> (output, log-sum-exp) of each -> `_join`

Letters: B rows, H query heads, Hkv K/V heads, G = H / Hkv, t new tokens, R = G * t, S keys,
D head_dim.
"""
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.backends import INTERPRETING

MAX_ROWS = 64      # per block of queries (16 in float32); if R is larger, programs share keys
MIN_SPLIT = 256    # keys: shorter splits cost more than they save
MAX_SPLITS = 64    # as many as `_join` handles at once
FEW_SPLITS = 8     # `_join` is compiled for up to this many, and for MAX_SPLITS
WARPS_PER_SM = 16  # target for the number of splits
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tuning:
    """Launch parameters, of which only `int8_dot` changes the result. `bench.py
    --mode=kernels` compares some.

    block_n: keys per block; 0 = 64 (32 if head_dim is over 128), and no more than a page.
    n_splits: number of splits of a row's keys; 0 = as many as fill the device.
    int8_dot: with int8 keys, quantize q to int8 too and multiply integers (values are still
    multiplied in float16); the error is about as large as that of quantizing the keys.
    """
    block_n: int = 0
    n_splits: int = 0
    num_warps: int = 4
    num_stages: int = 3
    int8_dot: bool = False


DEFAULT = Tuning()


@triton.jit
def _rounded(q):
    """Quantize q to int8 with one scale per row, like K with one per key."""
    q = q.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(q), 1) / 127, 1e-30)
    q = tl.math.div_rn(q, scale[:, None] + tl.zeros_like(q))
    # adding 1.5 * 2**23, which leaves no bits for a fraction, rounds to nearest
    return ((q + 12582912.0) - 12582912.0).to(tl.int8), scale


@triton.jit
def _page_at(TABLE, start, hi, PAGE: tl.constexpr):
    """The page of key `start`; -1 after the last key."""
    return tl.load(TABLE + start // PAGE, mask=start < hi, other=-1)


@triton.jit
def _places(start, hi, b, page, TABLE, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
            ONE_PAGE: tl.constexpr, PAIRS: tl.constexpr):
    """For keys i = start to start + BLOCK_N - 1 of row b: their page (or row) and offset in it,
    which keys exist, and which scales to read. If ONE_PAGE, all the keys are in `page`."""
    i = start + tl.arange(0, BLOCK_N)
    held = i < hi
    # two scales at a time, since asynchronous copies need 4 bytes; may read one extra
    wanted = i // 2 * 2 < hi
    if ONE_PAGE:  # no block crosses a page boundary
        held, wanted = held & (page >= 0), wanted & (page >= 0)
        page = page.to(tl.int64)
        # start % PAGE, written so that the compiler sees a multiple of BLOCK_N
        place = start // BLOCK_N % (PAGE // BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    elif PAGE:
        page = tl.load(TABLE + i // PAGE, mask=held, other=-1).to(tl.int64)
        place = i % PAGE
        held = held & (page >= 0)  # padding may count keys beyond a row's pages
    else:
        page, place = b, i
    if not PAIRS or (PAGE and not ONE_PAGE):
        wanted = held
    return page, place, i, held, wanted


@triton.jit
def _scores(q, q_scale, k, k_scale, scale, SCALES: tl.constexpr, INT8_DOT: tl.constexpr,
            QK: tl.constexpr, PRECISION: tl.constexpr):
    """(BLOCK_M, BLOCK_N) scores of q (BLOCK_M, BLOCK_D) and keys (BLOCK_N, BLOCK_D)."""
    if INT8_DOT:
        s = tl.dot(q, tl.trans(k)).to(tl.float32) * q_scale[:, None]
    else:
        s = tl.dot(q, tl.trans(k.to(QK)), input_precision=PRECISION)
    if SCALES:
        s *= k_scale.to(tl.float32)[None, :]
    return s * scale


@triton.jit
def _hide(s, q_pos, k_pos, held, window, ORDERED: tl.constexpr, WINDOWED: tl.constexpr):
    """Set the scores of keys that a query does not see to -inf."""
    seen = held[None, :]
    if ORDERED:
        distance = q_pos[:, None] - k_pos[None, :]
        seen = seen & (distance >= 0)
        if WINDOWED:
            seen = seen & (distance < window)
    return tl.where(seen, s, float('-inf'))


@triton.jit
def _weigh(s, top, total, acc):
    """Weights of a block's scores, and the running maximum, sum and values, rescaled to match."""
    new_top = tl.maximum(top, tl.max(s, 1))
    base = tl.where(new_top == float('-inf'), 0.0, new_top)  # for a row without keys so far
    p = tl.exp2(s - base[:, None])
    fade = tl.exp2(top - base)
    return p, new_top, total * fade + tl.sum(p, 1), acc * fade[:, None]


@triton.jit
def _weighted(p, v, v_scale, held, SCALES: tl.constexpr, PV: tl.constexpr,
              PRECISION: tl.constexpr):
    """Weights p (BLOCK_M, BLOCK_N) times values (BLOCK_N, BLOCK_D) as stored."""
    if SCALES:  # scale the weights, relative to the largest scale, to stay within half precision
        of_v = tl.where(held, v_scale.to(tl.float32), 0.0)[None, :]
        largest = tl.maximum(tl.max(of_v, 1), 1e-30)[:, None]
        y = tl.dot((p * (of_v / largest)).to(PV), v.to(PV), input_precision=PRECISION) * largest
    else:
        y = tl.dot(p.to(PV), v.to(PV), input_precision=PRECISION)
    return y


@triton.jit(do_not_specialize=['S', 'R', 'T', 'n_splits', 'window', 'table_width', 'cb', 'ch'])
def _split(Q, K, V, K_SCALE, V_SCALE, KV_LENS, TABLE, OUT, LSE,
           scale, S, R, T, n_kv_head, n_splits, window, table_width,
           kb, kh, ks, kd, vb, vh, vs, cb, ch, cs,  # strides of K (rows, heads, keys, D), V, scales
           D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
           SCALES: tl.constexpr, HAS_LENS: tl.constexpr, PAGE: tl.constexpr, ONE_PAGE: tl.constexpr,
           PAIRS: tl.constexpr, ORDERED: tl.constexpr, WINDOWED: tl.constexpr,
           INT8_DOT: tl.constexpr, QK: tl.constexpr, PV: tl.constexpr, PRECISION: tl.constexpr):
    """One block of query rows over one split of a row's keys. `scale` includes log2(e)."""
    n_blocks = tl.cdiv(R, BLOCK_M)
    block, rest = tl.program_id(0) % n_blocks, tl.program_id(0) // n_blocks
    split, bh = rest % n_splits, (rest // n_splits).to(tl.int64)
    b, h = bh // n_kv_head, bh % n_kv_head
    r, d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    of_row, of_d = r < R, d < D
    whole = of_row[:, None] & of_d[None, :]
    q, q_scale = tl.load(Q + bh * R * D + r[:, None] * D + d[None, :], mask=whole, other=0), None
    if INT8_DOT:
        q, q_scale = _rounded(q)
    else:
        q = q.to(QK)
    n = tl.load(KV_LENS + b).to(tl.int32) if HAS_LENS else S
    q_pos = n - T + r % T  # the last T keys are the queries' own
    first = tl.maximum(n - T - window + 1, 0) // BLOCK_N * BLOCK_N if WINDOWED else 0
    length = tl.cdiv(tl.cdiv(n - first, n_splits), BLOCK_N) * BLOCK_N
    lo = first + split * length
    hi = tl.minimum(lo + length, tl.minimum(n, S))  # padding of a ragged chunk may count beyond S
    top = tl.full((BLOCK_M,), float('-inf'), tl.float32)
    total, acc = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if PAIRS:
        cb, ch = cb * 2, ch * 2
    if PAGE:
        TABLE += b * table_width
    next_page = _page_at(TABLE, lo, hi, PAGE) if ONE_PAGE else 0
    for start in range(lo, hi, BLOCK_N):
        page = next_page
        if ONE_PAGE:  # looked up one block ahead, so that the loads of K and V need not wait
            next_page = _page_at(TABLE, start + BLOCK_N, hi, PAGE)
        page, place, k_pos, held, wanted = _places(start, hi, b, page, TABLE, BLOCK_N, PAGE,
                                                   ONE_PAGE, PAIRS)
        # 64-bit offsets of rows and pages; 32 bits are enough within one
        of_scale, some = page * cb + h * ch + place * cs, held[:, None] & of_d[None, :]
        k_at = (K + (page * kb + h * kh) + place * ks)[:, None] + d[None, :] * kd
        v_at = (V + (page * vb + h * vh) + place * vs)[:, None] + d[None, :]
        k = tl.load(k_at, mask=some, other=0)
        k_scale = tl.load(K_SCALE + of_scale, mask=wanted, other=0) if SCALES else None
        s = _scores(q, q_scale, k, k_scale, scale, SCALES, INT8_DOT, QK, PRECISION)
        s = _hide(s, q_pos, k_pos, held, window, ORDERED, WINDOWED)
        p, top, total, acc = _weigh(s, top, total, acc)
        v = tl.load(v_at, mask=some, other=0)
        v_scale = tl.load(V_SCALE + of_scale, mask=wanted, other=0) if SCALES else None
        acc += _weighted(p, v, v_scale, held, SCALES, PV, PRECISION)
    part = (bh * n_splits + split) * R
    y = acc / tl.maximum(total, 1e-30)[:, None]
    tl.store(OUT + (part + r[:, None]) * D + d[None, :], y.to(OUT.dtype.element_ty), mask=whole)
    # a maximum may ignore NaN, but the sum does not
    lse = tl.where(total == total, top + tl.log2(tl.maximum(total, 1e-30)), float('nan'))
    tl.store(LSE + part + r, lse, mask=of_row)


@triton.jit(do_not_specialize=['R', 'n_splits'])
def _join(PART, LSE, OUT, R, n_splits, D: tl.constexpr, BLOCK_D: tl.constexpr,
          BLOCK_S: tl.constexpr):
    """Merge the splits of one query row."""
    r, bh = tl.program_id(0) % R, tl.program_id(0).to(tl.int64) // R
    part, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    at = (bh * n_splits + part) * R + r
    lse = tl.load(LSE + at, mask=part < n_splits, other=float('-inf'))
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float('-inf'), 0.0, top))
    some = (weight > 0)[:, None] & (d < D)[None, :]  # empty splits are not read
    parts = tl.load(PART + at[:, None] * D + d[None, :], mask=some, other=0)
    y = tl.sum(parts * weight[:, None], 0)
    y = y / tl.maximum(tl.sum(weight, 0), 1e-30)
    tl.store(OUT + (bh * R + r) * D + d, y.to(OUT.dtype.element_ty), mask=d < D)


def _arithmetic(q: torch.dtype, stored: torch.dtype) -> tuple:
    """Dtypes of the two matmuls, and the precision if they are float32 (not tf32)."""
    wide = torch.promote_types(q, q if stored == torch.int8 else stored)
    # Triton's interpreter multiplies bfloat16 wrongly
    if wide == torch.float32 or (INTERPRETING and wide == torch.bfloat16):
        return tl.float32, tl.float32, 'ieee'
    kind = tl.bfloat16 if wide == torch.bfloat16 else tl.float16
    return kind, tl.float16 if stored == torch.int8 else kind, None  # int8 is exact in float16


def _n_processors(device: torch.device) -> int:
    if device.type != 'cuda':
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _blocks(R: int, D: int, precision, page_size: int, tuning: Tuning) -> tuple[int, int]:
    """Numbers of query rows and of keys per block.

    With 4 warps and 64 keys, the layout reads the scales of int8 K and V two at a time, which
    asynchronous copies require; with 128 keys it does not, and every block waits for them.
    """
    most = 16 if precision else MAX_ROWS  # without tensor cores, more do not fit in registers
    block_n = tuning.block_n or (32 if D > 128 else 64)
    if page_size in (16, 32, 64):
        block_n = min(block_n, page_size)
    return min(most, max(16, triton.next_power_of_2(R))), block_n


def splits(n_programs: int, S: int, num_warps: int, device: torch.device) -> int:
    """Number of key splits that fills the device if one split has `n_programs` programs; none is
    shorter than MIN_SPLIT."""
    wanted = WARPS_PER_SM // num_warps * _n_processors(device) // n_programs
    return max(1, min(wanted, triton.cdiv(S, MIN_SPLIT), MAX_SPLITS))


def stored_attention(q, k, v, k_scale=None, v_scale=None, *, kv_lens=None, table=None,
                     window: int = 0, tuning: Tuning = DEFAULT) -> torch.Tensor:
    """`attention.cached.cached_attention` as one kernel (two, if the keys are split).

    Args:
        q: (B, H, t, D) float32, bfloat16 or float16.
        k, v: (B, Hkv, S, D) as stored; if they are int8, also their scales (B, Hkv, S, 1).
            With `table` (B, n) int32 they are pools of pages (n_pages, Hkv, page_size, D), and
            row b has pages table[b] in order, -1 after the last; then `kv_lens` is required.
        kv_lens: (B,) number of keys of each row, including padding; the last t are the queries'
            own. 0 gives zeros. None = all S.
        window: number of keys that a query sees, including its own; 0 = no limit. Ignored if t = 1.
    Returns:
        (B, H, t, D).
    Raises:
        ValueError: if the dtypes are not supported or there are more than MAX_SPLITS splits.
    """
    B, H, t, D = q.shape
    page_size = 0 if table is None else k.size(2)
    n_kv_head, S = k.size(1), table.size(1) * page_size if page_size else k.size(2)
    rows = q.reshape(B, n_kv_head, -1, D).contiguous()                     # (B, Hkv, R, D)
    R, scales, out = rows.size(2), k_scale is not None, torch.empty_like(rows)
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16) or k.dtype == torch.float64:
        raise ValueError(f'q of {q.dtype} and K of {k.dtype}: the kernel takes float32, bfloat16 '
                         'and float16, K also int8')
    if tuning.n_splits > MAX_SPLITS:
        raise ValueError(f'n_splits={tuning.n_splits}: at most {MAX_SPLITS}')
    qk, pv, precision = _arithmetic(q.dtype, k.dtype)
    block_m, block_n = _blocks(R, D, precision, page_size, tuning)
    n_blocks = triton.cdiv(R, block_m)
    n_splits = tuning.n_splits or splits(
        B * n_kv_head * n_blocks, S, tuning.num_warps, q.device)
    part = out if n_splits == 1 else rows.new_empty(B * n_kv_head, n_splits, R, D,
                                                    dtype=torch.float32)
    lse = rows.new_empty(B * n_kv_head, n_splits, R, dtype=torch.float32)
    int8_dot = tuning.int8_dot and scales
    block_d = max(32 if int8_dot else 16, triton.next_power_of_2(D))
    pairs, of_scales = _scale_strides(k_scale)
    _split[(n_blocks * n_splits * B * n_kv_head,)](
        rows, k, v, k_scale, v_scale, kv_lens, table, part, lse,
        D ** -0.5 * LOG2_E, S, R, t, n_kv_head, n_splits, window,
        table.size(1) if page_size else 0, *k.stride(), *v.stride()[:3], *of_scales,
        D=D, BLOCK_D=block_d, BLOCK_M=block_m, BLOCK_N=block_n, SCALES=scales,
        HAS_LENS=kv_lens is not None, PAGE=page_size,
        ONE_PAGE=page_size > 0 and page_size % block_n == 0, PAIRS=pairs, ORDERED=t > 1,
        WINDOWED=window > 0 and t > 1, INT8_DOT=int8_dot, QK=qk, PV=pv, PRECISION=precision,
        num_warps=tuning.num_warps, num_stages=tuning.num_stages)
    if n_splits > 1:
        few = n_splits <= FEW_SPLITS
        _join[(B * n_kv_head * R,)](
            part, lse, out, R, n_splits, D=D, BLOCK_D=block_d,
            BLOCK_S=FEW_SPLITS if few else MAX_SPLITS, num_warps=1 if few else 4)
    return out.view(B, H, t, D)


def _scale_strides(k_scale) -> tuple[bool, tuple[int, int, int]]:
    """Whether the first two strides are even, and all three. Even ones are passed halved and
    doubled in the kernel, which tells the compiler that they are even."""
    if k_scale is None:
        return False, (0, 0, 0)
    b, h, s = k_scale.stride()[:3]
    pairs = b % 2 == 0 and h % 2 == 0
    return pairs, (b // 2, h // 2, s) if pairs else (b, h, s)
