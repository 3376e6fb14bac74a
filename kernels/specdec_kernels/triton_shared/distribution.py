"""Distributions inside Triton kernels: weights of tokens, and the order of tokens as one integer each.

Shapes: V = vocab_size. Functions take pointers to one row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import random
from .overlay import load_logits

NOISE_BLOCK = tl.constexpr(random.BLOCK)
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
LAST_ID = tl.constexpr(0x7FFFFFFF)
"""An id above all token ids."""


@triton.jit
def token_weights(
    logits_ptr, overlay_ptr, overlay_stride, ids, vocab_size, inv_t, lse, cut, tie_id, HAS_OVERLAY: tl.constexpr,
    tile_end,
):  # fmt: skip
    """Computes the weights of tokens `ids` of one row.

    HAS_OVERLAY: apply the row of the overlay at `overlay_ptr`. tile_end: see `overlay.load_tile`.

    Returns:
        float32 weights in the shape of `ids`; 0 outside of the vocabulary.
    """
    inside = (ids >= 0) & (ids < vocab_size)
    level = load_logits(logits_ptr, overlay_ptr, overlay_stride, ids, inside, vocab_size, HAS_OVERLAY, tile_end)
    kept = inside & ((level > cut) | ((level == cut) & (ids <= tie_id)))
    return tl.where(kept, tl.exp(tl.where(inv_t == 0, 0.0, level * inv_t - lse)), 0.0)


@triton.jit
def order_key(level, ids):
    """Returns an int64 that increases with the logit (float32, no NaN) and, for equal logits, decreases with the id."""
    bits = (level + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return (key.to(tl.int64) << 32) | (tl.full((), LAST_ID, tl.int32) - ids).to(tl.int64)


@triton.jit
def logit_of_key(key):
    """Returns the logit of an `order_key`."""
    high = (key >> 32).to(tl.int32)
    return tl.where(high >= 0, high, high ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def id_of_key(key):
    """Returns the token id of an `order_key`, int32."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def midpoint(low, high):
    """Returns the floor of the mean of two int64, without overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)
