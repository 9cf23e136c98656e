"""Storage of one slot: K and V in the cache's own dtype, int8 with its scales included; slices in, slices out."""
import torch

from kv.quant import dequantize_int8, quantize_int8


class KVStore:
    """(B, Hkv, capacity, D) of K and of V.

    Encoded K or V is a tuple of tensors that share their first three dimensions: (values,) or, for int8,
    (values, scales (B, Hkv, capacity, 1)).
    """

    def __init__(self, batch_size, n_kv_head, capacity, head_dim, dtype, compute_dtype, device):
        self.capacity, self.dtype, self.compute_dtype, self.device = capacity, dtype, compute_dtype, device

        def allocate():
            shape = (batch_size, n_kv_head, capacity)
            values = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
            if dtype == torch.int8:
                return values, torch.zeros(*shape, 1, dtype=torch.float16, device=device)
            return (values,)
        self.k, self.v = allocate(), allocate()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.k + self.v

    @property
    def nbytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in self.tensors)

    def encode(self, k, v):
        """Computed K, V (B, Hkv, t, D) as they are stored. What is attended is always what is stored, so that logits do
        not depend on how a sequence was cut into chunks."""
        if self.dtype == torch.int8:
            return quantize_int8(k), quantize_int8(v)
        return (k.to(self.dtype),), (v.to(self.dtype),)

    def decode(self, k, v):
        """Stored K, V back in the compute dtype (a copy only where the dtypes differ)."""
        if self.dtype == torch.int8:
            return dequantize_int8(*k, self.compute_dtype), dequantize_int8(*v, self.compute_dtype)
        return k[0].to(self.compute_dtype), v[0].to(self.compute_dtype)

    def read(self, start: int, end: int):
        """Encoded K, V at indices start .. end - 1, as views."""
        return self.cut(self.k, self.v, start, end)

    def write(self, start: int, k, v) -> None:
        """Encoded K, V to the indices from `start` on."""
        for stored, new in zip(self.tensors, k + v):
            stored[:, :, start:start + new.size(2)] = new

    def scatter(self, rows, indices, tokens, k, v) -> None:
        """stored[rows[n], :, indices[n]] = new[rows[n], :, tokens[n]] for all n."""
        for stored, new in zip(self.tensors, k + v):
            stored[rows, :, indices] = new[rows, :, tokens]

    @staticmethod
    def cut(k, v, start: int, end: int):
        return tuple(tuple(x[:, :, start:end] for x in kv) for kv in (k, v))

    @staticmethod
    def cat(pieces):
        """Encoded (K, V) pairs one after another."""
        return tuple(tuple(torch.cat(parts, dim=2) for parts in zip(*kv)) for kv in zip(*pieces))

    def fill_random_(self, chunk: int = 256) -> None:
        """Normal random K/V everywhere, a slice at a time so that no second copy of the cache ever exists."""
        B, n_kv_head, _, head_dim = self.k[0].shape
        for start in range(0, self.capacity, chunk):
            shape = (B, n_kv_head, min(chunk, self.capacity - start), head_dim)
            k, v = (torch.randn(shape, dtype=self.compute_dtype, device=self.device) for _ in 'kv')
            self.write(start, *self.encode(k, v))
