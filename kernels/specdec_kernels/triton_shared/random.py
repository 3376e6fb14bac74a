"""The noise of ``specdec_kernels.random`` inside Triton kernels: the same words and the same float bits.

Compile kernels that call these functions with ``enable_fp_fusion=False``: a fused multiply-add would change bits.

Tests: tests/interpreter/test_noise.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import random

_Q0, _Q1, _Q2, _Q3, _Q4 = (tl.constexpr(value) for value in random._Q)
_P0, _P1, _P2, _P3, _P4, _P5, _P6, _P7 = (tl.constexpr(value) for value in random._P)
_LN2_HIGH, _LN2_LOW = tl.constexpr(random._LN2_HIGH), tl.constexpr(random._LN2_LOW)
_SQRT_HALF_BITS = tl.constexpr(random._SQRT_HALF_BITS)
_INV32, _SPLIT = tl.constexpr(random._INV32), tl.constexpr(random._SPLIT)
ACCEPT, REPLAY = tl.constexpr(random.ACCEPT), tl.constexpr(random.REPLAY)


@triton.jit
def logarithm(y):
    """Computes the natural logarithm of positive normal float32."""
    bits = y.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    e = exponent.to(tl.float32)
    poly = f * _P7 + _P6
    poly = poly * f + _P5
    poly = poly * f + _P4
    poly = poly * f + _P3
    poly = poly * f + _P2
    poly = poly * f + _P1
    poly = poly * f + _P0
    square = f * f
    tail = poly * f * square
    tail = tail + e * _LN2_LOW
    tail = tail - square * 0.5
    return (f + tail) + e * _LN2_HIGH


@triton.jit
def exponential(word):
    """Returns standard exponential variates of uint32 words."""
    x = (word.to(tl.float32) + 0.5) * _INV32
    poly = x * _Q4 + _Q3
    poly = poly * x + _Q2
    poly = poly * x + _Q1
    poly = poly * x + _Q0
    small = x + (x * x) * poly
    y = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * _INV32
    return tl.where(word < _SPLIT, small, -logarithm(y))


@triton.jit
def gumbel(word):
    """Returns standard Gumbel variates of uint32 words."""
    return -logarithm(exponential(word))


@triton.jit
def uniform(word):
    """Returns uniform variates of uint32 words, strictly inside (0, 1)."""
    return ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def accept_uniform(seed, position, place):
    """Returns the keyed uniform variate of a node's acceptance test. place: index of the node in its row, int32."""
    first, _, _, _ = tl.philox(seed, tl.full((), 0, tl.int32), position, place, tl.full((), ACCEPT, tl.int32))
    return uniform(first)


@triton.jit
def gumbel_span(seed, position, index, stream, first, COUNT: tl.constexpr):
    """Returns Gumbel noise of tokens first .. first + COUNT - 1, both multiples of four; float32 [COUNT]."""
    quads = (first >> 2) + tl.arange(0, COUNT // 4)
    w0, w1, w2, w3 = tl.philox(seed, quads, position, index, tl.full((), stream, tl.int32))
    even, odd = tl.join(gumbel(w0), gumbel(w2)), tl.join(gumbel(w1), gumbel(w3))
    return tl.reshape(tl.join(even, odd), (COUNT,))
