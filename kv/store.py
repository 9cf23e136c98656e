"""Storage of one slot: K and V in the cache's own dtype, int8 with its scales included. What each kind of slot does when
tokens are appended is in `kv/slots.py` (contiguous, ring) and `kv/paged.py`."""
from dataclasses import dataclass

import torch

from kv.quant import quantize_int8
from kv.view import Encoded


@dataclass
class Target:
    """Where the new tokens of a step go: token j of row b to index places[b, j] of `rows[b, j]`, or nowhere if that is below 0.

    k, v: the whole storage, encoded. rows, places: (B, t) int64.
    """
    k: Encoded
    v: Encoded
    rows: torch.Tensor
    places: torch.Tensor


class KVStore:
    """(rows, Hkv, capacity, D) of K and of V; `rows` are sequences, or pages of a pool.

    On a CPU the memory of K lies as (rows, Hkv, D, capacity): a decode step multiplies queries by K transposed, and so
    finds it in the order in which a GEMM reads fastest (results/cpu/). `k` is a transposed view of it: nothing else
    depends on how it lies.
    """

    def __init__(self, rows, n_kv_head, capacity, head_dim, dtype, compute_dtype, device):
        self.capacity, self.dtype, self.compute_dtype, self.device = capacity, dtype, compute_dtype, device
        shape = (rows, n_kv_head, capacity)
        # SDPA, which attends over half precision, wants the last dimension contiguous
        transposed = self.device.type == 'cpu' and dtype not in (torch.bfloat16, torch.float16)
        with torch.inference_mode(False):  # an engine made under inference mode must be good outside of it
            self.k = self._allocate(shape, head_dim, transposed)
            self.v = self._allocate(shape, head_dim, False)

    def _allocate(self, shape, head_dim, transposed) -> Encoded:
        if transposed:
            values = torch.zeros(*shape[:2], head_dim, shape[2], dtype=self.dtype, device=self.device).transpose(2, 3)
        else:
            values = torch.zeros(*shape, head_dim, dtype=self.dtype, device=self.device)
        if self.dtype == torch.int8:
            return values, torch.zeros(*shape, 1, dtype=torch.float16, device=self.device)
        return (values,)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.k + self.v

    @property
    def nbytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in self.tensors)

    def encode(self, k, v) -> tuple[Encoded, Encoded]:
        """Computed K, V (B, Hkv, t, D) as they are stored. What is attended is always what is stored, so that logits do
        not depend on how a sequence was cut into chunks."""
        if self.dtype == torch.int8:
            return quantize_int8(k), quantize_int8(v)
        return (k.to(self.dtype),), (v.to(self.dtype),)

    def read(self, rows, start: int, end: int) -> tuple[Encoded, Encoded]:
        """Encoded K, V of `rows` (a slice or index tensor) at indices start .. end - 1; views where rows is a slice."""
        return tuple(tuple(x[rows, :, start:end] for x in kv) for kv in (self.k, self.v))

    def write(self, rows, start: int, k: Encoded, v: Encoded) -> None:
        """Encoded K, V to the indices from `start` on."""
        for stored, new in zip(self.tensors, k + v):
            stored[rows, :, start:start + new.size(2)] = new

    def scatter(self, rows, indices, new_rows, tokens, k: Encoded, v: Encoded) -> None:
        """stored[rows[n], :, indices[n]] = new[new_rows[n], :, tokens[n]] for all n."""
        for stored, new in zip(self.tensors, k + v):
            stored[rows, :, indices] = new[new_rows, :, tokens]

    def put(self, target: Target, k: Encoded, v: Encoded, own_rows: bool) -> None:
        """Encoded K, V (B, Hkv, t, D) to their target. own_rows: no two rows of the step share one of the storage; then shapes
        do not depend on which tokens are written."""
        rows, places = target.rows, target.places
        held, of_b = (slice(None), slice(None)), torch.arange(rows.size(0), device=rows.device)[:, None].expand_as(rows)
        token = torch.arange(rows.size(1), device=rows.device).expand_as(rows)
        if not own_rows:
            held = places >= 0
        rows, places, of_b, token = rows[held], places[held], of_b[held], token[held]
        for stored, new in zip(self.tensors, k + v):
            there = rows, slice(None), places.clamp(min=0)
            stored[there] = torch.where((places >= 0)[..., None, None], new[of_b, :, token], stored[there])

    def copy_row(self, source: int, target: int) -> None:
        for x in self.tensors:
            x[target] = x[source]

    def zero_values(self, rows: list[int], end: int) -> None:
        """V of `rows` at indices below `end` is zero, so that who reads it with weight 0 gets 0, which 0 * NaN is not.
        K may stay: a mask takes the place of scores, whatever they are."""
        for x in self.v:
            x[rows, :, :end] = 0

    def fill_random_(self, chunk: int = 256) -> None:
        """Normal random K/V everywhere, a slice at a time so that no second copy of the cache ever exists."""
        rows, n_kv_head, _, head_dim = self.k[0].shape
        for start in range(0, self.capacity, chunk):
            for first in range(0, rows, chunk):
                last = min(first + chunk, rows)
                shape = (last - first, n_kv_head, min(chunk, self.capacity - start), head_dim)
                k, v = (torch.randn(shape, dtype=self.compute_dtype, device=self.device) for _ in 'kv')
                self.write(slice(first, last), start, *self.encode(k, v))


def cut(k: Encoded, v: Encoded, start: int, end: int) -> tuple[Encoded, Encoded]:
    return tuple(tuple(x[:, :, start:end] for x in kv) for kv in (k, v))


def cat(pieces: list[tuple[Encoded, Encoded]]) -> tuple[Encoded, Encoded]:
    """Encoded (K, V) pairs one after another."""
    return tuple(tuple(torch.cat(parts, dim=2) for parts in zip(*kv)) for kv in zip(*pieces))
