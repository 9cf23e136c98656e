"""int8 and int4 storage of keys and values: symmetric, one fp16 scale per position and K/V head.

`attention.cached.dequantize` is the inverse.
"""
import torch

from attention.cached import dequantize


def quantize_int8(x: torch.Tensor, largest_value: int = 127) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., D) -> int8 values (..., D) and fp16 scales (..., 1), with x ~ values * scale.

    The error is at most scale / 2 per element, plus at most 2**-11 of the largest element: the
    scale is rounded to fp16 before the values are divided by it, and values are clamped. Vectors
    whose largest element is below 127 * 2**-14 = 0.008 have a subnormal scale and a larger error.
    Elements beyond 127 * 65504 = 8.3e6, including infinity, saturate. NaN stays NaN.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = wide.abs().amax(-1, keepdim=True)
    scale = (largest / largest_value).clamp(2 ** -24, 65504).to(torch.float16)
    values = (wide / scale).round().clamp(-largest_value, largest_value).to(torch.int8)
    return values, scale


def quantize_int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., D) -> uint8 (..., D / 2) and fp16 scales (..., 1). Values are from -7 to 7; a byte
    holds d + 8 in its low half and d + D/2 in its high one (`attention.cached.unpacked`)."""
    values, scale = quantize_int8(x, 7)
    low, high = (values + 8).to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4, scale


def fake_quantize_int8(x: torch.Tensor) -> torch.Tensor:
    """x rounded as an int8 cache would round it; gradients pass through unchanged (Bengio et al.
    2013)."""
    rounded = dequantize(*quantize_int8(x.detach()), x.dtype)
    return rounded + (x - x.detach())  # adds exactly 0 to finite values, with x's gradient
