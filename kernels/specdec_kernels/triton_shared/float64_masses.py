"""Masses of tokens in float64 inside Triton kernels, without float64 multiplications.

Most GPUs compute float64 at a sixty-fourth of the speed of float32. Here an exponential is the sum of a pair of float32
numbers, with a relative error of about 2^-45. Integer operations then set the bits of the float64. Masses are summed by
float64 additions.

Compile kernels that call these functions with ``enable_fp_fusion=False``: a fused multiply-add in place of a product
and a sum would change the errors that pairs carry.

Tests: tests/interpreter/test_float64_masses.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_backend import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)
_LOG2_E, _NEAREST = tl.constexpr(1.4426950216293335), tl.constexpr(12582912.0)
# log 2 in three parts; the product of a ten-bit number and the first or second part is exact
_LN2_1 = tl.constexpr(0.69317626953125)
_LN2_2 = tl.constexpr(-2.9090791940689087e-05)
_LN2_3 = tl.constexpr(1.820636014021829e-09)
# 1 / n! and its rounding error
_C3, _D3 = tl.constexpr(0.1666666716337204), tl.constexpr(-4.967053879312289e-09)
_C4, _D4 = tl.constexpr(0.0416666679084301), tl.constexpr(-1.2417634698280722e-09)
_C5, _D5 = tl.constexpr(0.008333333767950535), tl.constexpr(-4.3461720333760644e-10)
_C6, _D6 = tl.constexpr(0.0013888889225199819), tl.constexpr(-3.3631094437103215e-11)
_C7, _C8 = tl.constexpr(0.0001984127011382952), tl.constexpr(2.4801587642286904e-05)
_C9, _C10 = tl.constexpr(2.755731884462875e-06), tl.constexpr(2.755731998149713e-07)
_C11 = tl.constexpr(2.5052107943679403e-08)
_LEAST = tl.constexpr(-700.0)
"""Smaller exponents give no mass."""


@triton.jit
def fused_multiply_add(x, y, z):
    """Returns x * y + z, rounded once."""
    if _INTERPRETED:  # tl.fma of the interpreter rounds twice
        return (x.to(tl.float64) * y + z).to(tl.float32)
    else:
        return tl.fma(x, y, z)


@triton.jit
def two_sum(x, y):
    """Returns sum and rounding error of two float32."""
    total = x + y
    other = total - x
    return total, (x - (total - other)) + (y - other)


@triton.jit
def multiply_add_pair(high, low, r, c, d):
    """Returns (high + low) * r + (c + d) as a pair. c must be much larger than the other terms."""
    product = high * r
    rest = fused_multiply_add(high, r, -product)
    rest = fused_multiply_add(low, r, rest)
    total = c + product
    return total, (product - (total - c)) + (rest + d)


@triton.jit
def exp_difference(level, top):
    """Computes exp(level - top) of float32 tensors or numbers, level <= top.

    Returns:
        The exponential in float64: 1 if both are equal; 0 for a level that is NaN, -inf, or at least 700 below `top`.
    """
    exponent, error = two_sum(level, -top)
    within = exponent > _LEAST
    exponent = tl.where(within, exponent, 0.0)
    error = tl.where(within, error, 0.0)
    power = (exponent * _LOG2_E + _NEAREST) - _NEAREST
    r, low = two_sum(exponent - power * _LN2_1, -(power * _LN2_2))
    r, rest = two_sum(r, error)
    r, other = two_sum(r, -(power * _LN2_3))
    low += rest + other
    series = (((r * _C11 + _C10) * r + _C9) * r + _C8) * r + _C7
    value, tail = multiply_add_pair(series, series * 0.0, r, _C6, _D6)
    value, tail = multiply_add_pair(value, tail, r, _C5, _D5)
    value, tail = multiply_add_pair(value, tail, r, _C4, _D4)
    value, tail = multiply_add_pair(value, tail, r, _C3, _D3)
    value, tail = multiply_add_pair(value, tail, r, 0.5, 0.0)
    value, tail = multiply_add_pair(value, tail, r, 1.0, 0.0)
    value, tail = multiply_add_pair(value, tail, r, 1.0, 0.0)
    tail = fused_multiply_add(value, low, tail)
    # in [0.7, 1.5) in units of 2^-52; below 1 the exponent is one lower, with twice the units
    whole = (value * 16777216.0).to(tl.int32).to(tl.int64) << 28
    whole += (tail * 4503599627370496.0).to(tl.int32).to(tl.int64)
    above = whole >= 4503599627370496
    shift = power.to(tl.int32) + tl.where(above, 1022, 1021)
    bits = (shift.to(tl.int64) << 52) + tl.where(above, whole, whole << 1)
    return tl.where(within, bits, 0).to(tl.float64, bitcast=True)
