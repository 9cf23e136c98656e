"""Attention of a few new tokens over stored K and V: split over the keys, with all query heads of a
K/V head in one block.

Stored K and V are read once, as stored (int8 with its scales): decoded copies exist only in
registers. Tensor cores take operands of 16 bits from shared memory, so int8 is read in pairs, as
int16, and even and odd dimensions are multiplied apart (`_apart`). The keys of a row are split over
several programs, whose results are merged by their log-sum-exp (flash-decoding, Dao et al. 2023).
Splits have the same length in all rows, so that a long row among short ones gets more programs;
those after a row's last key end at once. The rows of a block are the query heads of one K/V head
times the new tokens, in any ratio: 12 heads over 1 fill 12 of 16 rows.

    program   split 0     split 1     split 2       a row of 7 keys, with room for 11, in splits of
    keys      0 1 2 3     4 5 6       -             4 -> (output, log-sum-exp) of each -> `_join`

Letters: B rows, H query heads, Hkv K/V heads, G = H / Hkv, t new tokens, R = G * t, S keys,
D head_dim.
"""
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.backends import INTERPRETING
from attention.kernels.new_key import New, arguments_of, queries, write_new

MAX_ROWS = 64      # per block of queries (16 in float32); if R is larger, programs share keys
MIN_SPLIT = 256    # keys: shorter splits cost more than they save
LONG_SPLIT = 1024  # keys: no split of a decode step is longer, if MAX_SPLITS are enough
MAX_SPLITS = 64    # as many as `_join` handles at once
FEW_SPLITS = 8     # `_join` is compiled for up to this many, and for MAX_SPLITS
WARPS_PER_SM = 16  # target for the number of splits
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tuning:
    """Launch parameters, which do not change the result. `bench.py --mode=kernels` compares some.

    block_n, num_warps: keys per block, and its warps; 0 = as in `_blocks`.
    n_splits: splits of a row's keys, at most MAX_SPLITS; 0 = as `split_blocks` says.
    """
    block_n: int = 0
    n_splits: int = 0
    num_warps: int = 0
    num_stages: int = 3


def _int8_to_bfloat16(shift: int) -> str:
    """PTX: of two int16 the lower (shift 0) or upper (8) bytes to bfloat16, exactly: 128 + the
    lower 7 bits, less 128 or, if the sign is set, 256. On one line: Inductor of torch 2.11 breaks
    kernels that use a text with a newline (pytorch issue 183420)."""
    return ' '.join(f"""{{
        .reg .b32 x, low, high, minus_one;
        shr.u32 x, $1, {shift};
        lop3.b32 low, x, 0x007f007f, 0x43004300, 0xea;
        lop3.b32 high, x, 0x00800080, 0x43004300, 0xea;
        mov.b32 minus_one, 0xbf80bf80;
        fma.rn.bf16x2 $0, high, minus_one, low;
    }}""".split())


def _int8_to_float16(shift: int) -> str:
    """The same to float16: 1024 + 128 + the number, less 1152."""
    return ' '.join(f"""{{
        .reg .b32 x, offset;
        shr.u32 x, $1, {shift};
        lop3.b32 x, x, 0x00ff00ff, 0x64806480, 0x6a;
        mov.b32 offset, 0x64806480;
        sub.f16x2 $0, x, offset;
    }}""".split())


_LOWER_BF16, _UPPER_BF16 = (tl.constexpr(_int8_to_bfloat16(shift)) for shift in (0, 8))
_LOWER_FP16, _UPPER_FP16 = (tl.constexpr(_int8_to_float16(shift)) for shift in (0, 8))
# Weights are multiplied by the scales of V and by this, as float16 loses precision below 6e-5. It
# has no room for V above 65,504 anyway, so scales are at most 516.
ENLARGED = tl.constexpr(64)
_PTX = tl.constexpr(not INTERPRETING and torch.version.hip is None)


@triton.jit
def _apart(x, DTYPE: tl.constexpr):
    """The lower and the upper int8 of each int16. In assembly (pure, two numbers at a time), since
    the compiler would convert each number on its own."""
    if _PTX and DTYPE == tl.bfloat16:
        even = tl.inline_asm_elementwise(_LOWER_BF16, '=r,r', [x], tl.bfloat16, True, 2)
        odd = tl.inline_asm_elementwise(_UPPER_BF16, '=r,r', [x], tl.bfloat16, True, 2)
    elif _PTX and DTYPE == tl.float16:
        even = tl.inline_asm_elementwise(_LOWER_FP16, '=r,r', [x], tl.float16, True, 2)
        odd = tl.inline_asm_elementwise(_UPPER_FP16, '=r,r', [x], tl.float16, True, 2)
    else:
        even, odd = ((x << 8) >> 8).to(DTYPE), (x >> 8).to(DTYPE)
    return even, odd


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
def _scores(q, q_odd, k, k_scale, scale, q_pos, k_pos, held, window, ORDERED: tl.constexpr,
            WINDOWED: tl.constexpr, SCALES: tl.constexpr, DTYPE: tl.constexpr,
            PRECISION: tl.constexpr):
    """(BLOCK_M, BLOCK_N) scores of q (BLOCK_M, WIDTH) and keys (BLOCK_N, WIDTH); -inf for keys that
    a query does not see."""
    scale = tl.cast(scale, tl.float32)  # Inductor of torch 2.11 passes float64
    if SCALES:
        even, odd = _apart(k, DTYPE)
        s = tl.dot(q, tl.trans(even), input_precision=PRECISION)
        s = tl.dot(q_odd, tl.trans(odd), s, input_precision=PRECISION)
        s *= (k_scale.to(tl.float32) * scale)[None, :]
    else:
        s = tl.dot(q, tl.trans(k.to(DTYPE)), input_precision=PRECISION) * scale
    seen = held[None, :]
    if ORDERED:
        distance = q_pos[:, None] - k_pos[None, :]
        seen = seen & (distance >= 0)
        if WINDOWED:
            seen = seen & (distance < window)
    return tl.where(seen, s, float('-inf'))


@triton.jit
def _weigh(s, top, total):
    """Weights of a block's scores, the running maximum and sum, and by how much the weights so far
    become less."""
    new_top = tl.maximum(top, tl.max(s, 1))
    base = tl.where(new_top == float('-inf'), 0.0, new_top)  # for a row without keys so far
    p = tl.exp2(s - base[:, None])
    fade = tl.exp2(top - base)
    return p, new_top, total * fade + tl.sum(p, 1), fade[:, None]


@triton.jit
def _add(p, v, v_scale, held, acc, acc_odd, SCALES: tl.constexpr, DTYPE: tl.constexpr,
         PRECISION: tl.constexpr):
    """Add the values of a block, times their weights."""
    if SCALES:
        p *= tl.where(held, v_scale.to(tl.float32) * ENLARGED, 0.0)[None, :]
        v, odd = _apart(v, DTYPE)
        acc_odd = tl.dot(p.to(DTYPE), odd, acc_odd, input_precision=PRECISION)
    return tl.dot(p.to(DTYPE), v.to(DTYPE), acc, input_precision=PRECISION), acc_odd


@triton.jit
def _store(at, lse_at, acc, acc_odd, top, total, whole, of_row, n_splits, SCALES: tl.constexpr):
    """Write the values divided by the sum of the weights, and the log-sum-exp of the scores. Values
    of an empty split, which nobody reads, are not written."""
    whole = whole & ((total > 0)[:, None] | (n_splits == 1))
    share = 1 / tl.maximum(total * ENLARGED if SCALES else total, 1e-30)[:, None]
    tl.store(at, (acc * share).to(at.dtype.element_ty), mask=whole)
    if SCALES:
        tl.store(at + 1, (acc_odd * share).to(at.dtype.element_ty), mask=whole)
    # a maximum may ignore NaN, but the sum does not
    lse = tl.where(total == total, top + tl.log2(tl.maximum(total, 1e-30)), float('nan'))
    tl.store(lse_at, lse, mask=of_row)


@triton.jit
def _attend_new(X, to_v, K, kd, V, K_SCALE, V_SCALE, at_scale, GAIN, COS, SIN, d, writes, eps,
                q, q_odd, scale, top, total, acc, acc_odd, D: tl.constexpr, BLOCK_D: tl.constexpr,
                NORM: tl.constexpr, ROPE: tl.constexpr, SCALES: tl.constexpr, DTYPE: tl.constexpr):
    """Write the new key and value (`write_new`), and attend to them as they are in registers: this
    program does not read what it has just written."""
    k, k_odd, k_scale, v, v_odd, v_scale = write_new(
        X, to_v, K, kd, V, K_SCALE, V_SCALE, at_scale, GAIN, COS, SIN, d, writes, eps, D, BLOCK_D,
        NORM, ROPE, SCALES, DTYPE)
    s = tl.sum(q.to(tl.float32) * k, 1)
    if SCALES:
        s = (s + tl.sum(q_odd.to(tl.float32) * k_odd, 1)) * k_scale
    p, top, total, fade = _weigh((s * tl.cast(scale, tl.float32))[:, None], top, total)
    if SCALES:
        p *= v_scale * ENLARGED
    return top, total, acc * fade + p * v, acc_odd * fade + p * v_odd


@triton.jit
def _keys_of(split, of_split, n, S, T, window, place, BLOCK_N: tl.constexpr,
             WINDOWED: tl.constexpr, OWNS: tl.constexpr, RING: tl.constexpr):
    """A split's keys that are in memory, lo to hi - 1; if OWNS also the index of the new key, and
    whether it is in this split. place: its offset, negative if it is not written. (torch.compile
    would take a tensor for written if its numbers came from here and were in an address.)"""
    first = tl.maximum(n - T - window + 1, 0) // BLOCK_N * BLOCK_N if WINDOWED else 0
    lo = first + split * of_split * BLOCK_N
    hi = tl.minimum(lo + of_split * BLOCK_N, tl.minimum(n, S))  # padding may count beyond S
    new = place if RING else n - 1  # the last one, except in a ring
    mine = (place >= 0) & (new >= lo) & (new < hi)
    if OWNS and not RING:
        hi = tl.where(mine, new, hi)
    return lo, hi, new, mine


@triton.jit
def _attend_block(start, hi, new, page, q, q_odd, K, V, K_SCALE, V_SCALE, TABLE, b, h, d, of_d,
                  scale, q_pos, window, top, total, acc, acc_odd,
                  kb, kh, ks, kd, vb, vh, vs, cb, ch, cs, BLOCK_N: tl.constexpr,
                  SCALES: tl.constexpr, PAGE: tl.constexpr, ONE_PAGE: tl.constexpr,
                  PAIRS: tl.constexpr, ORDERED: tl.constexpr, WINDOWED: tl.constexpr,
                  DTYPE: tl.constexpr, PRECISION: tl.constexpr, REPLACES: tl.constexpr):
    """Attention to keys start to start + BLOCK_N - 1, without key `new` if REPLACES."""
    page, place, k_pos, held, wanted = _places(start, hi, b, page, TABLE, BLOCK_N, PAGE, ONE_PAGE,
                                               PAIRS)
    if REPLACES:
        held = held & (k_pos != new)
    # 64-bit offsets of rows and pages; 32 bits are enough within one
    of_scale, some = page * cb + h * ch + place * cs, held[:, None] & of_d[None, :]
    k_at = (K + (page * kb + h * kh) + place * ks)[:, None] + d[None, :] * kd
    v_at = (V + (page * vb + h * vh) + place * vs)[:, None] + d[None, :]
    k = tl.load(k_at, mask=some, other=0)
    k_scale = tl.load(K_SCALE + of_scale, mask=wanted, other=0) if SCALES else None
    s = _scores(q, q_odd, k, k_scale, scale, q_pos, k_pos, held, window, ORDERED, WINDOWED, SCALES,
                DTYPE, PRECISION)
    p, top, total, fade = _weigh(s, top, total)
    v = tl.load(v_at, mask=some, other=0)
    v_scale = tl.load(V_SCALE + of_scale, mask=wanted, other=0) if SCALES else None
    acc, acc_odd = _add(p, v, v_scale, held, acc * fade, acc_odd * fade, SCALES, DTYPE, PRECISION)
    return top, total, acc, acc_odd


@triton.jit(do_not_specialize=['S', 'R', 'T', 'n_splits', 'of_split', 'window', 'table_width',
                               'cb', 'ch', 'qb', 'rope_b'])
def _split(Q, K, V, K_SCALE, V_SCALE, KV_LENS, TABLE, OUT, LSE,
           Q_GAIN, K_GAIN, COS, SIN, ROWS, PLACES,  # of `New`
           scale, S, R, T, n_kv_head, n_splits, of_split, window, table_width, qb, eps, rope_b,
           kb, kh, ks, kd, vb, vh, vs, cb, ch, cs,  # strides of K (rows, heads, keys, D), V, scales
           D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
           SCALES: tl.constexpr, HAS_LENS: tl.constexpr, PAGE: tl.constexpr, ONE_PAGE: tl.constexpr,
           PAIRS: tl.constexpr, ORDERED: tl.constexpr, WINDOWED: tl.constexpr,
           DTYPE: tl.constexpr, PRECISION: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
           OWNS: tl.constexpr, RING: tl.constexpr):
    """One block of query rows over one split of a row's keys, `of_split` blocks. `scale` includes
    log2(e). If SCALES, K and V are int8, read as int16: see `_apart`. If OWNS, Q also has k and v
    of a token a row, which the program of the new key writes."""
    n_blocks = tl.cdiv(R, BLOCK_M)
    block, rest = tl.program_id(0) % n_blocks, tl.program_id(0) // n_blocks
    split, bh = rest % n_splits, (rest // n_splits).to(tl.int64)
    b, h = bh // n_kv_head, bh % n_kv_head
    EACH: tl.constexpr = 2 if SCALES else 1  # numbers in an element of K and V
    WIDTH: tl.constexpr = BLOCK_D // EACH
    r, d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
    of_row, of_d, number = r < R, d < D // EACH, d[None, :] * EACH
    Q += b * qb
    COS, SIN = (COS + b * rope_b, SIN + b * rope_b) if ROPE else (None, None)
    q, q_odd = queries(Q + ((h * R + r) * D)[:, None], Q_GAIN, COS, SIN, number, of_row, eps, D,
                       BLOCK_D, NORM, ROPE, SCALES, DTYPE)
    n = tl.load(KV_LENS + b).to(tl.int32) if HAS_LENS else S
    place = tl.load(PLACES + b).to(tl.int32) if OWNS else n
    lo, hi, new, mine = _keys_of(split, of_split, n, S, T, window, place, BLOCK_N, WINDOWED, OWNS,
                                 RING)
    top = tl.full((BLOCK_M,), float('-inf'), tl.float32)
    total, acc = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M, WIDTH), tl.float32)
    acc_odd, cb, ch = acc, cb * 2 if PAIRS else cb, ch * 2 if PAIRS else ch
    if OWNS:
        if mine:
            row = tl.load(ROWS + b).to(tl.int64)
            top, total, acc, acc_odd = _attend_new(
                Q + (n_kv_head * R + h) * D, n_kv_head * D,
                K + (row * kb + h * kh + place * ks), kd, V + (row * vb + h * vh + place * vs),
                K_SCALE, V_SCALE, row * cb + h * ch + place * cs, K_GAIN, COS, SIN, number,
                block == 0, eps, q, q_odd, scale, top, total, acc, acc_odd, D, BLOCK_D, NORM, ROPE,
                SCALES, DTYPE)
    if SCALES:
        K, V = K.to(tl.pointer_type(tl.int16)), V.to(tl.pointer_type(tl.int16))
    TABLE = TABLE + b * table_width if PAGE else None
    next_page = _page_at(TABLE, lo, hi, PAGE) if ONE_PAGE else 0
    for start in range(lo, hi, BLOCK_N):
        page = next_page
        if ONE_PAGE:  # looked up one block ahead, so that the loads of K and V need not wait
            next_page = _page_at(TABLE, start + BLOCK_N, hi, PAGE)
        top, total, acc, acc_odd = _attend_block(
            start, hi, new, page, q, q_odd, K, V, K_SCALE, V_SCALE, TABLE, b, h, d, of_d, scale,
            n - T + r % T, window, top, total, acc, acc_odd,  # the last T keys are the queries' own
            kb // EACH, kh // EACH, ks // EACH, kd, vb // EACH, vh // EACH, vs // EACH, cb, ch, cs,
            BLOCK_N, SCALES, PAGE, ONE_PAGE, PAIRS, ORDERED, WINDOWED, DTYPE, PRECISION,
            OWNS and RING)
    part = (bh * n_splits + split) * R
    _store(OUT + (part + r[:, None]) * D + number, LSE + part + r, acc, acc_odd, top, total,
           of_row[:, None] & of_d[None, :], of_row, n_splits, SCALES)


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


def arithmetic(q: torch.dtype, stored: torch.dtype) -> tuple:
    """Dtype of the matmuls, and the precision if it is float32 (not tf32)."""
    wide = torch.promote_types(q, q if stored == torch.int8 else stored)
    # Triton's interpreter multiplies bfloat16 wrongly
    if wide == torch.float32 or (INTERPRETING and wide == torch.bfloat16):
        return tl.float32, 'ieee'
    return tl.bfloat16 if wide == torch.bfloat16 else tl.float16, None


def _n_processors(device: torch.device) -> int:
    if device.type != 'cuda':
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _blocks(R: int, D: int, scales: bool, precision, page_size: int,
            tuning: Tuning) -> tuple[int, int, int]:
    """Numbers of query rows and of keys per block, and of warps.

    Fewer warps share more of their work, but need more registers. The scales of int8 K and V
    must be read two at a time, which asynchronous copies require: with 128 keys and 4 warps, or 64
    and 2, they are not, and every block waits for them.
    """
    most = 16 if precision else MAX_ROWS  # without tensor cores, more do not fit in registers
    block_m = min(most, max(16, triton.next_power_of_2(R)))
    block_n, num_warps = 32 if D > 128 else 64, 4
    if scales and block_m == 16 and D in (32, 64) and page_size not in (16, 32) and not precision:
        block_n, num_warps = (64, 1) if page_size % 128 else (128, 2)
    block_n = tuning.block_n or block_n
    if page_size in (16, 32, 64):
        block_n = min(block_n, page_size)
    return block_m, block_n, tuning.num_warps or num_warps


def split_blocks(n_programs: int, S: int, decoding: bool, block_n: int, num_warps: int,
                 device: torch.device) -> int:
    """Number of key blocks in a split, such that splits fill the device if one of S keys has
    `n_programs` programs. A decode step also splits the keys of many rows, which may have
    different lengths."""
    wanted = WARPS_PER_SM // num_warps * _n_processors(device) // n_programs
    keys = max(MIN_SPLIT, triton.cdiv(S, max(1, min(wanted, MAX_SPLITS))))
    if decoding:
        keys = min(keys, max(LONG_SPLIT, triton.cdiv(S, MAX_SPLITS)))
    return triton.cdiv(keys, block_n)


def stored_attention(q, k, v, k_scale=None, v_scale=None, *, kv_lens=None, table=None,
                     window: int = 0, tuning: Tuning = Tuning(),
                     new: New | None = None) -> torch.Tensor:
    """`attention.cached.cached_attention` as one kernel (two, if the keys are split), of what
    `attention.cached.kernel_takes`.

    Args:
        q: (B, H, t, D) float32, bfloat16 or float16.
        k, v: (B, Hkv, S, D) as stored; int8 (of contiguous heads) with scales (B, Hkv, S, 1).
            With `table` (B, n) int32 they are pools of pages (n_pages, Hkv, page_size, D), and
            row b has pages table[b] in order, -1 after the last; then `kv_lens` is required.
        kv_lens: (B,) number of keys of each row, including padding; the last t are the queries'
            own. 0 gives zeros. None = all S.
        new: then q is (B, 1, H + 2 * Hkv, D), contiguous, the heads of q | k | v of a token a row,
            or (B, 1, H, D) of a layer that reads. K and V of the token are written to k and v;
            kv_lens, which is required, counts it.
        window: number of keys that a query sees, including its own; 0 = no limit. Ignored if t = 1.
    Returns (B, H, t, D).
    """
    page_size = 0 if table is None else k.size(2)
    n_kv_head, S = k.size(1), table.size(1) * page_size if page_size else k.size(2)
    B, D, t = q.size(0), q.size(3), 1 if new else q.size(2)
    H = new.n_head if new else q.size(1)
    rows = q if new else q.reshape(B, n_kv_head, -1, D).contiguous()       # (B, Hkv, R, D)
    R, scales = H * t // n_kv_head, k_scale is not None
    out = torch.empty(B, n_kv_head, R, D, dtype=q.dtype, device=q.device)
    tensors, eps, rope_stride, flags = arguments_of(new)
    dtype, precision = arithmetic(q.dtype, k.dtype)
    block_m, block_n, num_warps = _blocks(R, D, scales, precision, page_size, tuning)
    n_blocks = triton.cdiv(R, block_m)
    windowed = window > 0 and t > 1
    # keys, from the first visible block on
    seen = max(1, min(S, window + t + block_n) if windowed else S)
    of_split = triton.cdiv(triton.cdiv(seen, tuning.n_splits), block_n) if tuning.n_splits else (
        split_blocks(B * n_kv_head * n_blocks, seen, t == 1, block_n, num_warps, q.device))
    n_splits = triton.cdiv(seen, of_split * block_n)
    part = out if n_splits == 1 else q.new_empty(B * n_kv_head, n_splits, R, D,
                                                 dtype=torch.float32)
    lse = q.new_empty(B * n_kv_head, n_splits, R, dtype=torch.float32)
    block_d = max(32 if scales else 16, triton.next_power_of_2(D))
    pairs, of_scales = _scale_strides(k_scale)
    _split[(n_blocks * n_splits * B * n_kv_head,)](
        rows, k, v, k_scale, v_scale, kv_lens, table, part, lse, *tensors,
        D ** -0.5 * LOG2_E, S, R, t, n_kv_head, n_splits, of_split, window,
        table.size(1) if page_size else 0, rows.stride(0), eps, rope_stride, *k.stride(),
        *v.stride()[:3], *of_scales,
        D=D, BLOCK_D=block_d, BLOCK_M=block_m, BLOCK_N=block_n, SCALES=scales,
        HAS_LENS=kv_lens is not None, PAGE=page_size,
        ONE_PAGE=page_size > 0 and page_size % block_n == 0, PAIRS=pairs, ORDERED=t > 1,
        WINDOWED=windowed, DTYPE=dtype, PRECISION=precision, **flags, num_warps=num_warps,
        num_stages=tuning.num_stages)
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
