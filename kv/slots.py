"""Storage of one slot, and how appending works: a global slot keeps every position, a local one
is a ring of the last W.

    ring of W = 4 after 6 tokens     index  0 1 2 3       A chunk may overwrite keys that its own
                                     holds  4 5 2 3       first queries need, so `append` gathers
                                                          ring + chunk *before* it writes.

Stored K and V are passed as tuples: (k, v), each (B, Hkv, S, D), or quantized (k, v, k_scale,
v_scale) with scales (B, Hkv, S, 1). Where K = V, they are the same tensor.
"""
import functools

import torch

from attention.backends import INTERPRETING
from kv.quantize import quantize_int4, quantize_int8

# Decode steps of rows that differ in length read a global slot up to a multiple of BUCKET, so that
# shapes, and therefore allocations, change only once every BUCKET steps.
BUCKET = 64
QUANTIZE = {torch.int8: quantize_int8, torch.uint8: quantize_int4}  # int4: two values per byte


class KVStore:
    """(rows, Hkv, capacity, D) of K and of V, in the cache's dtype.

    On a CPU the memory of K is laid out as (rows, Hkv, D, capacity): a decode step multiplies
    queries by K transposed, and a GEMM is fastest with that layout (results/cpu/). `k` is a
    transposed view of it; nothing else depends on the layout.
    """

    def __init__(self, rows, n_kv_head, capacity, head_dim, dtype, compute_dtype, device,
                 tied=False):
        self.capacity, self.dtype, self.tied = capacity, dtype, tied
        self.compute_dtype, self.device = compute_dtype, device
        # half precision uses SDPA, which needs the last dimension to be contiguous, and so does V
        wide = not tied and dtype in (torch.float64, torch.float32, torch.int8)
        transposed = wide and device.type == 'cpu' and not INTERPRETING  # those read a GPU's
        width = head_dim // 2 if dtype == torch.uint8 else head_dim
        zeros = functools.partial(torch.zeros, rows, n_kv_head, device=device)
        with torch.inference_mode(False):  # a cache created in inference mode must work outside it
            if transposed:
                k = zeros(width, capacity, dtype=dtype).transpose(2, 3)
            else:
                k = zeros(capacity, width, dtype=dtype)
            self.tensors = k, k if tied else zeros(capacity, width, dtype=dtype)
            if dtype in QUANTIZE:
                scale = zeros(capacity, 1, dtype=torch.float16)
                self.tensors += scale, scale if tied else torch.zeros_like(scale)

    def distinct(self, stored):
        """K and V (and their scales), or only K (and its scale) where K = V."""
        return stored[::2] if self.tied else stored

    @property
    def nbytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in self.distinct(self.tensors))

    def encode(self, k, v) -> tuple[torch.Tensor, ...]:
        """Convert K, V (B, Hkv, t, D) to their stored form. Queries attend to stored values even
        within a chunk, so that logits do not depend on how a sequence is split into chunks (up to
        floating-point rounding)."""
        if self.dtype not in QUANTIZE:
            k = k.to(self.dtype)
            return k, k if self.tied else v.to(self.dtype)
        quantize = QUANTIZE[self.dtype]
        k, k_scale = quantize(k)
        v, v_scale = (k, k_scale) if self.tied else quantize(v)
        return k, v, k_scale, v_scale

    def read(self, rows, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Stored K, V of `rows` at indices start .. end - 1; views if `rows` is a slice."""
        return tuple(x[rows, :, start:end] for x in self.tensors)

    def write(self, rows, start: int, new) -> None:
        """Write encoded K, V at the indices from `start` on."""
        for stored, x in zip(self.distinct(self.tensors), self.distinct(new)):
            stored[rows, :, start:start + x.size(2)] = x

    def scatter(self, rows, indices, new) -> None:
        """Write encoded K, V (n, Hkv, 1, D): token i to index indices[i] of row rows[i]."""
        for stored, x in zip(self.distinct(self.tensors), self.distinct(new)):
            stored[rows, :, indices] = x[:, :, 0]

    def zero_values(self, rows: int | torch.Tensor, end: int) -> None:
        """Zero V of `rows` below `end`. K can stay: masking replaces scores, even NaN."""
        for x in self.tensors[1::2]:
            x[rows, :, :end] = 0


class GlobalStore(KVStore):
    """Stores every position of every row; the index is the position."""

    def append(self, new, rows, start: int):
        """Write a chunk (encoded, t tokens) to `rows`, which all have `start` tokens.

        Returns the K, V that its queries attend to, in order, with the chunk last.
        """
        end = start + new[0].size(2)
        self.write(rows, start, new)
        return new if start == 0 else self.read(rows, 0, end)

    def append_token(self, new, step):
        """Write one token to each active row of `step`; rows differ in length.

        Returns K, V of all rows of the step, and the number of keys in each row, (B,).
        """
        self.scatter(step.active_rows, step.active_starts, new)
        bucket = -(-max(1, *step.ends) // BUCKET) * BUCKET
        return self.read(step.select, 0, min(bucket, self.capacity)), step.kv_lens


class RingStore(KVStore):
    """Stores the last `capacity` positions of every row, position p at index p % capacity.

    window: number of keys that a query sees; `capacity` is smaller if all sequences are shorter.
    """

    def __init__(self, window: int, *args):
        super().__init__(*args)
        self.window = window

    def append(self, new, rows, start: int):
        """Like `GlobalStore.append`, but returns the keys in the window, then the chunk."""
        t = new[0].size(2)
        if t == 1:  # overwrites the key that just left the window; the order does not matter
            self.write(rows, start % self.capacity, new)
            return self.read(rows, 0, min(start + 1, self.capacity))
        before = min(start, self.window - 1)
        pieces = [self.read(rows, a, b) for a, b in self.spans(start - before, before)]
        seen = tuple(torch.cat(x, dim=2) for x in zip(*pieces, new)) if pieces else new
        offset = max(0, t - self.capacity)  # of the first token of the chunk that is kept
        for a, b in self.spans(start + offset, t - offset):
            self.write(rows, a, [x[:, :, offset:offset + b - a] for x in new])
            offset += b - a
        return seen

    def append_token(self, new, step):
        """Like `GlobalStore.append_token`, but returns no lengths if every ring is full."""
        self.scatter(step.active_rows, step.active_starts % self.capacity, new)
        if all(end >= self.capacity for n, end in zip(step.lens, step.ends) if n):
            return self.read(step.select, 0, self.capacity), None
        n = min(max(1, *step.ends), self.capacity)
        return self.read(step.select, 0, n), step.kv_lens.clamp(max=self.capacity)

    def spans(self, position: int, n: int) -> list[tuple[int, int]]:
        """Index ranges of the n <= capacity positions from `position` on, in order."""
        if n == 0:
            return []
        a = position % self.capacity
        if a + n <= self.capacity:
            return [(a, a + n)]
        return [(a, self.capacity), (0, a + n - self.capacity)]
