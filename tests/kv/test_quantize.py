"""int8 and int4 storage: the error of stored values, and the effects of rounding in training."""
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.cached import dequantize
from kv.quantize import fake_quantize_int8, quantize_int4, quantize_int8


def sample(seed, magnitude, dtype=torch.float64):
    x = torch.randn(3, 2, 5, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * magnitude).to(dtype)


def roundtrip(x):
    return dequantize(*quantize_int8(x), torch.float64)


@given(seed=st.integers(0, 999), exponent=st.floats(-1, 6),
       dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
def test_error_is_at_most_half_a_step_and_the_rounding_of_the_scale(seed, exponent, dtype):
    x = sample(seed, 10 ** (min(exponent, 4.0) if dtype == torch.float16 else exponent), dtype)
    _, scale = quantize_int8(x)
    largest = x.double().abs().amax(-1, keepdim=True)
    # error that the clamp to 127 may cause
    rounding = (largest - 127 * scale.double()).clamp(min=0)
    assert (rounding <= 2 ** -11 * largest).all()
    error = (roundtrip(x) - x.double()).abs()
    assert (error <= (scale.double() / 2).maximum(rounding) * (1 + 1e-6)).all()


@given(seed=st.integers(0, 999), magnitude=st.sampled_from([0.1, 1.0, 50.0]))
def test_int4_is_within_half_a_step_of_a_seventh_of_the_largest(seed, magnitude):
    x = sample(seed, magnitude)
    packed, scale = quantize_int4(x)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 2, 5, 8)
    largest = x.abs().amax(-1, keepdim=True)
    assert ((scale.double() * 7 - largest).abs() <= 2 ** -10 * largest).all()
    error = (dequantize(packed, scale, torch.float64) - x).abs()
    assert (error <= scale.double() / 2 + 2 ** -10 * largest).all()


def test_int4_packs_the_halves_of_a_vector():
    packed, scale = quantize_int4(torch.tensor([7.0, -7.0, 1.0, 0.0]))
    assert scale.tolist() == [1.0] and packed.tolist() == [15 + 16 * 9, 1 + 16 * 8]


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
def test_int8_by_hand(dtype):
    """A scale is the largest element of a row over 127: tiny values are 0 and no NaN, and huge ones
    saturate at the largest float16 scale."""
    values, scale = quantize_int8(torch.tensor([[127.0, -3.0], [0.5, 254.0]], dtype=dtype))
    assert scale.tolist() == [[1.0], [2.0]] and values.tolist() == [[127, -3], [0, 127]]
    tiny = torch.tensor([[0.0, 0.0], [1e-12, -3e-20]], dtype=dtype)
    assert torch.equal(roundtrip(tiny), torch.zeros(2, 2).double())
    assert roundtrip(torch.tensor([[1e30, -1e30]], dtype=dtype)).tolist() == [
        [127 * 65504.0, -127 * 65504.0]]


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_fake_quantize_is_the_rounded_value_with_the_identity_as_gradient(dtype):
    x = sample(3, 2.0, dtype).requires_grad_()
    y = fake_quantize_int8(x)
    values, scale = quantize_int8(x.detach())  # decoded with one rounding
    assert torch.equal(y.detach(), (values.double() * scale.double()).to(dtype))
    assert torch.equal(y.detach(), dequantize(values, scale, dtype))
    assert not torch.equal(y, x)
    upstream = sample(4, 1.0, dtype)
    y.backward(upstream)
    assert torch.equal(x.grad, upstream)
