"""RoPE: half-split pairs rotated by pos * theta**(-2d/D), exact at any position and dtype."""
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.rope import RotaryTable, apply_rope
from tests.helpers.reference import rotate

FAR = 100_000


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed),
                       dtype=torch.float64).to(dtype)


def turned(table, x, start=0):
    """Rotate x (B, h, t, D) at positions start, start + 1, ..."""
    return apply_rope(x, *table(start, start + x.size(2), 'cpu', x.dtype))


@given(half=st.integers(1, 9), theta=st.sampled_from([2.0, 100.0, 10000.0, 5e5]),
       start=st.integers(0, 5000), t=st.integers(1, 40))
def test_is_a_complex_rotation(half, theta, start, t):
    x = random(2, 3, t, 2 * half)
    y = turned(RotaryTable(2 * half, theta), x, start)
    assert (y - rotate(x, range(start, start + t), theta)).abs().max() < 1e-10


@pytest.mark.parametrize('dtype, allowed', [(torch.float64, 1e-9), (torch.float32, 1e-7)])
def test_angles_at_position_100000(dtype, allowed):
    cos, sin = RotaryTable(8, 10000.0)(FAR, FAR + 3, 'cpu', dtype)
    assert cos.dtype == sin.dtype == dtype
    for n in range(3):
        for d in range(4):
            # at most 1e5: a float64 angle is accurate to 1e-11
            angle = (FAR + n) * 10000.0 ** (-2 * d / 8)
            # the tables are as wide as a head, the first half with the sign of -sin
            for half, sign in ((0, -1), (4, 1)):
                assert cos[n, half + d].item() == pytest.approx(math.cos(angle), abs=allowed)
                assert sin[n, half + d].item() == pytest.approx(sign * math.sin(angle), abs=allowed)


@pytest.mark.parametrize('dtype, ulp', [(torch.bfloat16, 2 ** -8), (torch.float16, 2 ** -11)])
def test_half_precision_is_rotated_wide_and_rounded_once(dtype, ulp):
    x, table = random(1, 2, 3, 8, dtype=dtype), RotaryTable(8, 10000.0)
    assert {part.dtype for part in table(0, 4, 'cpu', dtype)} == {torch.float32}
    y = turned(table, x, FAR)
    exact = rotate(x.double(), range(FAR, FAR + 3), 10000.0)
    assert y.dtype == dtype
    assert ((y.double() - exact).abs() <= ulp * exact.abs() + 2e-6).all()
