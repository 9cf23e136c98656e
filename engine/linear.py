"""Linear layers that are fast on a CPU for the few rows of a decode step."""
import torch
from torch import nn
from torch.nn import functional as F


class FewRowsLinear(nn.Linear):
    """nn.Linear with faster matmuls for small batches in float32 on a CPU.

    There a GEMM reads the weight at memory speed for up to 3 rows and at half of it from 4 on. As a
    batch of matmuls with `CHUNK` of its rows each (views: only the result is copied) 4 to 15 rows
    run at up to twice the speed. Where `engine.weights.pack_weights` has left a copy of the weight
    in MKL's own order, more rows gain as much.
    """
    CHUNK, CHUNKED_ROWS = 64, range(4, 16)
    packed = None  # (number of rows it is for, the packed weight, the weight and its version then)

    def forward(self, x):
        if torch.compiler.is_compiling():  # the number of rows may be symbolic
            return F.linear(x, self.weight, self.bias)
        # a single sequence pays for every further question
        few = not self.packed and x.numel() < self.CHUNKED_ROWS[0] * self.in_features
        if few or x.dtype != torch.float32 or not self.plain_on_cpu():
            return F.linear(x, self.weight, self.bias)
        n_rows = x.numel() // x.size(-1)
        rows, shape = x.reshape(n_rows, -1), x.shape[:-1]
        packed_for = self.packed[0] if self.packed else 0
        if packed_for // 2 < n_rows <= packed_for and self._packed_is_current():
            return self._by_packed(rows).view(*shape, -1)
        if n_rows not in self.CHUNKED_ROWS or self.out_features < self.CHUNK:
            return F.linear(x, self.weight, self.bias)
        y = self._in_chunks(rows).view(*shape, -1)
        return y if self.bias is None else y.add_(self.bias)

    def _packed_is_current(self):
        """Whether the weight has neither been changed nor replaced since it was packed."""
        return self.packed[2] is self.weight and self.packed[3] == self.weight._version

    def __getstate__(self):  # the packed weight can be neither copied nor saved
        return {name: value for name, value in self.__dict__.items() if name != 'packed'}

    def _by_packed(self, x):
        """x (rows, n_in) -> (rows, n_out), filled up to the rows that the packed weight is for."""
        n_rows, (wanted, packed, *_) = x.size(0), self.packed
        x = x if n_rows == wanted else F.pad(x, (0, 0, 0, wanted - n_rows))
        return torch.ops.mkl._mkl_linear(x, packed, self.weight, self.bias, wanted)[:n_rows]

    def plain_on_cpu(self):
        """Whether the weight is an ordinary float32 one on a CPU, and no gradient is wanted."""
        w = self.weight
        return (type(w) is nn.Parameter and w.dtype == torch.float32 and w.device.type == 'cpu'
                and not torch.is_grad_enabled())

    def _in_chunks(self, x):
        """x (rows, n_in) -> (rows, n_out)"""
        n_rows, w = x.size(0), self.weight
        whole = w.size(0) - w.size(0) % self.CHUNK
        y = x @ w[:whole].view(-1, self.CHUNK, w.size(1)).transpose(1, 2)    # (chunks, rows, CHUNK)
        y = y.transpose(0, 1).reshape(n_rows, whole)
        return y if whole == w.size(0) else torch.cat([y, F.linear(x, w[whole:])], dim=1)


def speed_up_few_rows(model) -> None:
    """The model's Linear layers become `FewRowsLinear`, in place; their weights stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FewRowsLinear
