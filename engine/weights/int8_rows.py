"""int8 with a scale per row, of weights and activations, for `quantized`."""
import torch
from torch.nn import functional as F

# `torch._int_mm` on CUDA needs more than 16 rows, and all three sizes to be multiples of 8.
CUDA_ROWS, CUDA_MULTIPLE = 32, 8


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (m, k) -> int8 values (m, k) and float32 scales (m, 1) with x ~ values * scale; the error
    is at most scale / 2. A row with NaN or infinity has a non-finite scale."""
    x = x.float()
    largest = x.abs().amax(1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)
    return (x * inverse).round().to(torch.int8), largest / 127


def int8_matmul(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x (m, k) float @ (weight (n, k) int8 * scale (n,)).T -> (m, n) float32, in torch."""
    values, x_scale = quantize_rows(x)
    m = len(x)
    if x.is_cuda:
        values = F.pad(values, (0, 0, 0, max(CUDA_ROWS - m, -m % CUDA_MULTIPLE)))
    return torch._int_mm(values, weight.t())[:m].float() * (x_scale * scale)
