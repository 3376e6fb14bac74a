"""Distributions inside Triton kernels: weights of tiles of a row of logits, and the order of tokens as one integer
each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import random
from ..ops.distribution_stats import reference
from .overlay import load_logits

NOISE_BLOCK = tl.constexpr(random.BLOCK)
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
LEAST_LOG_WEIGHT = tl.constexpr(reference.LEAST_LOG_WEIGHT)
LAST_ID = tl.constexpr(0x7FFFFFFF)
"""An id beyond all others."""


@triton.jit
def token_weights(logits, cells, room, ids, count, inv_t, lse, cut, tie, FOLD: tl.constexpr, end):
    """Weights of tokens `ids` (any shape) of a distribution whose row of `count` logits starts at `logits`: float32.
    FOLD: with the overlay's row at `cells`; end: as in `overlay_triton.load_tile`."""
    inside = (ids >= 0) & (ids < count)
    level = load_logits(logits, cells, room, ids, inside, count, FOLD, end)
    kept = inside & ((level > cut) | ((level == cut) & (ids <= tie)))
    return tl.where(kept, tl.exp(tl.where(inv_t == 0, 0.0, level * inv_t - lse)), 0.0)


@triton.jit
def order_key(level, ids):
    """int64 that grows with the level (float32, no NaN) and, among equal levels, falls with the id."""
    bits = (level + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return (key.to(tl.int64) << 32) | (tl.full((), LAST_ID, tl.int32) - ids).to(tl.int64)


@triton.jit
def logit_of_key(ranked):
    """The level of a rank."""
    key = (ranked >> 32).to(tl.int32)
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def id_of_key(ranked):
    """The id of a rank, int32."""
    return 0x7FFFFFFF - (ranked & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def midpoint(low, high):
    """Floor of the mean of two int64."""
    return (low >> 1) + (high >> 1) + (low & high & 1)
