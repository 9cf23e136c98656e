"""int8 storage of keys and values: symmetric, one fp16 scale per position and KV head."""
import torch


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., D) -> int8 values (..., D) and fp16 scales (..., 1), with x ~ values * scale.

    The scale is rounded to fp16 *before* the values are divided by it, so its rounding costs no accuracy, only (by the
    clamp) up to 2**-11 of the largest element. The error is at most scale / 2 an element, beside that clamp. Vectors
    whose largest element is below 127 * 2**-14 = 0.008 have a subnormal scale, and lose relative accuracy; elements beyond
    127 * 65504 = 8.3e6, infinity too, saturate there. NaN stays NaN.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (wide.abs().amax(-1, keepdim=True) / 127).clamp(2 ** -24, 65504).to(torch.float16)
    values = (wide / scale).round().clamp(-127, 127).to(torch.int8)
    return values, scale


def dequantize_int8(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `quantize_int8`, in `dtype`; the product is taken in fp32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    return (values.to(wide) * scale.to(wide)).to(dtype)


def fake_quantize_int8(x: torch.Tensor) -> torch.Tensor:
    """x rounded as an int8 cache would round it; gradients pass straight through (Bengio et al. 2013)."""
    rounded = dequantize_int8(*quantize_int8(x.detach()), x.dtype)
    return rounded + (x - x.detach())  # the bracket is exactly 0, so the value is exactly the rounded one
