"""Linear layers whose products with a few rows are fast on a CPU."""
import torch
from torch import nn
from torch.nn import functional as F


class Linear(nn.Linear):
    """nn.Linear, by other roads for the few rows of a decode step in float32 on a CPU.

    There a GEMM reads the weight at memory speed for up to 3 rows and at half of it from 4 on. As a batch of products with
    `CHUNK` of its rows each (views: nothing is copied but the result) 4 to 15 rows run at up to twice the speed. Where
    `engine.weights.pack_weights` has left a copy of the weight in MKL's own order, more rows gain as much.
    """
    CHUNK, CHUNKED_ROWS = 64, range(4, 16)
    packed = None  # (number of rows it is made for, the weight in that order, the weight and its version when it was made)

    def forward(self, x):
        # in this order: where it is compiled the number of rows may be no number; a single sequence pays for each question
        if (torch.compiler.is_compiling() or (not self.packed and x.numel() < self.CHUNKED_ROWS[0] * self.in_features)
                or x.dtype != torch.float32 or not self._plain_on_cpu()):
            return F.linear(x, self.weight, self.bias)
        n_rows = x.numel() // x.size(-1)
        if self.packed and self.packed[0] // 2 < n_rows <= self.packed[0] and self._packed_is_current():
            return self._by_packed(x.reshape(n_rows, -1)).view(*x.shape[:-1], -1)
        if n_rows not in self.CHUNKED_ROWS or self.out_features < self.CHUNK:
            return F.linear(x, self.weight, self.bias)
        y = self._in_chunks(x.reshape(n_rows, -1)).view(*x.shape[:-1], -1)
        return y if self.bias is None else y.add_(self.bias)

    def _packed_is_current(self):
        """Not where the weight has been changed, in place or for another, since it was packed."""
        return self.packed[2] is self.weight and self.packed[3] == self.weight._version

    def __getstate__(self):  # the packed weight can be neither copied nor saved
        return {name: value for name, value in self.__dict__.items() if name != 'packed'}

    def _by_packed(self, x):
        """x (rows, n_in) -> (rows, n_out); rows are filled up to the number that the packed weight is for."""
        n_rows, (wanted, packed, *_) = x.size(0), self.packed
        x = x if n_rows == wanted else F.pad(x, (0, 0, 0, wanted - n_rows))
        return torch.ops.mkl._mkl_linear(x, packed, self.weight, self.bias, wanted)[:n_rows]

    def _plain_on_cpu(self):
        w = self.weight
        return (type(w) is nn.Parameter and w.dtype == torch.float32 and w.device.type == 'cpu'
                and not torch.is_grad_enabled())

    def _in_chunks(self, x):
        """x (rows, n_in) -> (rows, n_out)"""
        n_rows, w = x.size(0), self.weight
        whole = w.size(0) - w.size(0) % self.CHUNK
        y = x @ w[:whole].view(-1, self.CHUNK, w.size(1)).transpose(1, 2)                # (chunks, rows, CHUNK)
        y = y.transpose(0, 1).reshape(n_rows, whole)
        return y if whole == w.size(0) else torch.cat([y, F.linear(x, w[whole:])], dim=1)
