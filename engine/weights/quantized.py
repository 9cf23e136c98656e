"""Quantized weights, multiplied as integers. Activations are quantized to int8 on the fly, with a
scale per token; sums are exact in int32.

    int8 (W8A8)   weights with a scale per output row (LLM.int8(), Dettmers et al. 2022, without
                  outlier columns; what Character.AI and vLLM serve with)
    int4 (W4A8)   weights with a scale for each group of columns of a row; lm_head stays int8

    y[m, n] = x_scale[m] * w_scale[n] * sum_k x_int8[m, k] * w_int8[n, k]  + bias[n]

Computed by the extension (`engine.native`) on a CPU, and by torch elsewhere; equal up to rounding.
"""
import torch
from torch import nn

from engine import native
from engine.weights.int8_rows import CUDA_MULTIPLE, int8_matmul, quantize_rows
from engine.weights.linear import FewRowsLinear, by_extension, describe

BLOCK, COLUMNS = 16, 4  # rows and columns of one load, `int8_tile` in kernels.h


def int4_matmul(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x (m, k) float @ (weight (n, k) int8 of -8 to 7 * scale (n, k / group)).T -> (m, n) float32,
    in torch."""
    values, x_scale = quantize_rows(x)
    group = weight.size(1) // scale.size(1)
    floats = weight.float() * scale.float().repeat_interleave(group, dim=1)
    return values.float() @ floats.T * x_scale


def quantize_groups(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """weight (n, k) -> values (n, k) from -8 to 7 as int8, and bfloat16 scales (n, k / group)."""
    groups = weight.float().view(len(weight), -1, group)
    largest = torch.maximum(groups.amax(2) / 7, groups.amin(2) / -8)
    scale = largest.clamp(min=1e-30).to(torch.bfloat16)
    values = (groups / scale.float()[:, :, None]).round().clamp(-8, 7)
    return values.to(torch.int8).view_as(weight), scale


def blocks(x: torch.Tensor, columns: int) -> torch.Tensor:
    """(n, k) -> (n / 16, k / columns, 16, columns), the extension's layout; n is padded to 16."""
    rows = nn.functional.pad(x, (0, 0, 0, -len(x) % BLOCK))
    return rows.view(-1, BLOCK, x.size(1) // columns, columns).transpose(1, 2).contiguous()


class QuantizedLinear(nn.Module):
    """A quantized copy of a Linear layer.

    weight, scale: as returned by `quantize_rows` or `quantize_groups`, or packed for the extension.
    """
    kind: int           # the extension's code for this format
    matmul: staticmethod

    def __init__(self, linear: nn.Linear, values, scale, group: int):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.group, self.bias = group, linear.bias
        self.packed = (values.device.type == 'cpu' and self.in_features % 4 == 0
                       and native.library() is not None)
        values, scale = (self.pack if self.packed else self.pad)(values, scale)
        self.register_buffer('weight', values)
        self.register_buffer('scale', scale)

    def forward(self, x):
        if self.packed:
            return by_extension(describe(self), x).to(x.dtype)
        y = self.matmul(x.reshape(-1, self.in_features), self.weight, self.scale)
        y = y[:, :self.out_features]
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], -1)


class Int8Linear(QuantizedLinear):
    """One scale per row: (n,) float32."""
    kind, matmul = native.INT8, staticmethod(int8_matmul)

    def __init__(self, linear: nn.Linear):
        values, scale = quantize_rows(linear.weight.detach())
        super().__init__(linear, values, scale[:, 0].contiguous(), linear.in_features)

    @staticmethod
    def pad(values, scale):
        """n is padded for CUDA's matmul: the output layer has any vocabulary."""
        missing = -len(scale) % CUDA_MULTIPLE
        return nn.functional.pad(values, (0, 0, 0, missing)), nn.functional.pad(scale, (0, missing))

    @staticmethod
    def pack(values, scale):
        """uint8 blocks (n / 16, k / 4, 16, 4) of w + 128, and (n,) scales; n is padded to 16."""
        values = (blocks(values, COLUMNS).to(torch.int16) + 128).to(torch.uint8)
        return values, nn.functional.pad(scale, (0, -len(scale) % BLOCK))

    def rows(self, idx: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the weight as floats: (..., k) for idx (...)."""
        if self.packed:
            values = self.weight[idx // BLOCK, :, idx % BLOCK].flatten(-2).to(torch.int16) - 128
        else:
            values = self.weight[idx]
        return (values * self.scale[idx][..., None]).to(dtype)


class Int4Linear(QuantizedLinear):
    """One scale per `group` columns of a row. (Without the extension a value takes a byte.)"""
    kind, matmul = native.INT4, staticmethod(int4_matmul)

    def __init__(self, linear: nn.Linear, group: int):
        super().__init__(linear, *quantize_groups(linear.weight.detach(), group), group)

    @staticmethod
    def pad(values, scale):
        return values, scale

    @staticmethod
    def pack(values, scale):
        """uint8 blocks (n / 16, k / 8, 16, 4) of w + 8, the first 4 of 8 columns in low nibbles;
        and scales (n / 16, k / group, 16)."""
        halves = blocks(values, 2 * COLUMNS) + 8                      # (n / 16, k / 8, 16, 8)
        low, high = halves.to(torch.uint8).split(COLUMNS, dim=3)
        return (low | high << 4).contiguous(), blocks(scale, 1)


class Int8Embedding(nn.Module):
    """The token embedding tied to an int8 output layer: one matrix, stored once."""

    def __init__(self, head: Int8Linear, dtype: torch.dtype):
        super().__init__()
        self.head, self.dtype = head, dtype

    def forward(self, idx):
        return self.head.rows(idx, self.dtype)


def quantize(model, make) -> None:
    """Replace the Linear layers of the model's blocks by `make(layer)`, the output layer by an int8
    one and the token embedding by a view of that, in place."""
    dtype = model.dtype
    for module in list(model.transformer.h.modules()):
        for name, child in module.named_children():
            if type(child) in (nn.Linear, FewRowsLinear):  # a subclass may compute something else
                setattr(module, name, make(child))
    model.lm_head = Int8Linear(model.lm_head)
    model.transformer.wte = Int8Embedding(model.lm_head, dtype)
