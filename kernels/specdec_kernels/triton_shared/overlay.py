"""Reads logits inside Triton kernels, with a sparse overlay of processed logits applied on load.

`specdec_kernels.overlay.Overlay` describes the layout: three planes of ceil(V / 32) words, then the replaced logits.
Functions take pointers to one row; overlay_stride is the number of int32 words of a row of the overlay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import overlay

WORD, PLANES = tl.constexpr(overlay.WORD), tl.constexpr(overlay.PLANES)
WORD_SHIFT = tl.constexpr(overlay.WORD.bit_length() - 1)
NO_LOGIT = tl.constexpr(float("-inf"))


@triton.jit
def count_bits(word):
    """Returns the number of set bits of nonnegative words, int32 of any shape."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return (word + (word >> 16)) & 0x3F


@triton.jit
def find_replacement(overlay_ptr, ids, wanted, vocab_size, overlay_stride):
    """Returns the word with the replaced logit of each token, and whether the token has one."""
    word_at = (ids >> WORD_SHIFT) * PLANES
    bit = ids & (WORD - 1)
    word = tl.load(overlay_ptr + word_at, mask=wanted, other=0)
    wanted = wanted & (((word >> bit) & 1) != 0)
    before = tl.load(overlay_ptr + word_at + 1, mask=wanted, other=0)
    lower = word & ((bit * 0 - 1 << bit) ^ -1)
    place = tl.cdiv(vocab_size, WORD) * PLANES + before + count_bits(lower)
    return place, wanted & (before >= 0) & (before < overlay_stride) & (place < overlay_stride)


@triton.jit
def load_tile(row_ptr, ids, inside, num_columns, tile_end, other):
    """Loads columns `ids` of a row.

    tile_end: end of consecutive ids. All tiles but the last are then loaded without a mask, in wide loads, for any
    `num_columns`. None if the ids are not consecutive, or if the mask does not prevent wide loads.

    Returns:
        The values; `other` if not `inside`.
    """
    if tile_end is None:
        found = tl.load(row_ptr + ids, mask=inside, other=other)
    else:
        if tile_end <= num_columns:
            found = tl.load(row_ptr + ids)
        else:
            found = tl.load(row_ptr + ids, mask=inside, other=other)
    return found


@triton.jit
def store_tile(row_ptr, ids, values, inside, num_columns, tile_end):
    """Stores values to columns `ids` of a row if `inside`. tile_end: see `load_tile`."""
    if tile_end is None:
        tl.store(row_ptr + ids, values, mask=inside)
    else:
        if tile_end <= num_columns:
            tl.store(row_ptr + ids, values)
        else:
            tl.store(row_ptr + ids, values, mask=inside)


@triton.jit
def load_logits(logits_ptr, overlay_ptr, overlay_stride, ids, inside, vocab_size, HAS_OVERLAY: tl.constexpr, tile_end):
    """Loads the logits of tokens `ids` (int32, any shape) of one row.

    HAS_OVERLAY: apply the row of the overlay at `overlay_ptr`. tile_end: see `load_tile`.

    Returns:
        float32 logits; -inf if not `inside`.
    """
    level = load_tile(logits_ptr, ids, inside, vocab_size, tile_end, NO_LOGIT).to(tl.float32)
    if HAS_OVERLAY:
        place, replaced = find_replacement(overlay_ptr, ids, inside, vocab_size, overlay_stride)
        value = tl.load(overlay_ptr + place, mask=replaced, other=0).to(tl.float32, bitcast=True)
        level = tl.where(replaced, value, level)
        forbidden = tl.load(overlay_ptr + (ids >> WORD_SHIFT) * PLANES + 2, mask=inside, other=0)
        level = tl.where(((forbidden >> (ids & (WORD - 1))) & 1) != 0, level + NO_LOGIT, level)
    return level
