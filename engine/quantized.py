"""int8 weights, multiplied as int8 (W8A8): weights are symmetric with a scale per output row,
activations with a scale per token, found as they come; products are summed exactly, in int32.
(LLM.int8(), Dettmers et al. 2022, without outlier columns; what Character.AI and vLLM serve with.)

    y[m, n] = x_scale[m] * w_scale[n] * sum_k x_int8[m, k] * w_int8[n, k]  + bias[n]

On a CPU by the extension (`engine.native`), elsewhere, and where there is none, by
`torch._int_mm`: the same numbers, up to the rounding of the last line.
"""
import torch
from torch import nn

from engine import native
from engine.linear import by_extension

BLOCK, GROUP = 16, 4  # rows of a block, columns of a group of packed weights: see `int8_tile` in kernels.h
# On CUDA `torch._int_mm` takes more than 16 rows, and multiples of 8.
CUDA_ROWS = 32


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (m, k) -> int8 values (m, k) and float32 scales (m, 1) with x ~ values * scale; the error
    is at most scale / 2. A row with NaN or infinity has a scale that is not finite."""
    x = x.float()
    largest = x.abs().amax(1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)
    return (x * inverse).round().to(torch.int8), largest / 127


def int8_matmul(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x (m, k) float @ (weight (n, k) int8 * scale (n,)).T -> (m, n) float32, by torch."""
    m = x.size(0)
    values, x_scale = quantize_rows(x)
    if x.is_cuda and m < CUDA_ROWS:
        values = nn.functional.pad(values, (0, 0, 0, CUDA_ROWS - m))
    elif x.is_cuda and m % 8:
        values = nn.functional.pad(values, (0, 0, 0, -m % 8))
    sums = torch._int_mm(values, weight.t())[:m]
    return sums.float() * (x_scale * scale)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """(n, k) int8 -> uint8 blocks (n / 16, k / 4, 16, 4) of w + 128, rows filled up to 16."""
    n, k = weight.shape
    rows = nn.functional.pad(weight, (0, 0, 0, -n % BLOCK)).view(-1, BLOCK, k // GROUP, GROUP)
    return (rows.transpose(1, 2).to(torch.int16) + 128).to(torch.uint8).contiguous()


class Int8Linear(nn.Module):
    """A Linear whose weight is int8, made from one in floats.

    weight: int8 (n, k), or packed for the extension. scale: (n,) float32 (packed: filled up).
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        values, scale = quantize_rows(linear.weight.detach())
        scale = scale[:, 0].contiguous()
        on_cpu = values.device.type == 'cpu'
        self.packed = on_cpu and values.size(1) % GROUP == 0 and native.library() is not None
        if self.packed:
            values, scale = pack(values), nn.functional.pad(scale, (0, -len(scale) % BLOCK))
        self.register_buffer('weight', values)
        self.register_buffer('scale', scale)
        self.bias = linear.bias

    def forward(self, x):
        if self.packed:
            return by_extension(self.described(), x).to(x.dtype)
        y = int8_matmul(x.reshape(-1, self.in_features), self.weight, self.scale)
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    def described(self) -> tuple[native.Linear, torch.Tensor | None]:
        """For the extension; and a tensor that must live as long."""
        bias = None if self.bias is None else self.bias.detach().float()
        return native.Linear(self.weight.data_ptr(), self.scale.data_ptr(),
                             None if bias is None else bias.data_ptr(), self.out_features,
                             self.in_features, native.INT8), bias

    def rows(self, idx: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the weight as floats: (..., k) for idx (...)."""
        if self.packed:
            values = self.weight[idx // BLOCK, :, idx % BLOCK].flatten(-2).to(torch.int16) - 128
        else:
            values = self.weight[idx]
        return (values * self.scale[idx][..., None]).to(dtype)


class Int8Embedding(nn.Module):
    """The token embedding tied to an int8 output layer: one matrix, stored once."""

    def __init__(self, head: Int8Linear, dtype: torch.dtype):
        super().__init__()
        self.head, self.dtype = head, dtype

    def forward(self, idx):
        return self.head.rows(idx, self.dtype)


def quantize_int8(model) -> None:
    """The model's Linear layers become `Int8Linear`, in place; the embedding reads lm_head's."""
    dtype = model.dtype
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
    model.transformer.wte = Int8Embedding(model.lm_head, dtype)
