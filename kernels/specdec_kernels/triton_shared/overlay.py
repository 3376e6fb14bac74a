"""Reading logits inside Triton kernels, with the edits of an overlay folded in where there is one."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import overlay

WORD, PLANES = tl.constexpr(overlay.WORD), tl.constexpr(overlay.PLANES)
WORD_SHIFT = tl.constexpr(overlay.WORD.bit_length() - 1)
NO_LOGIT = tl.constexpr(float("-inf"))


@triton.jit
def count_bits(word):
    """How many bits of a word that is not negative are set; int32 of any shape."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return (word + (word >> 16)) & 0x3F


@triton.jit
def find_replacement(cells, ids, wanted, vocab, room):
    """Cell of the other logit of each token, and whether it has one. cells: of one row, `room` of them."""
    word_at = (ids >> WORD_SHIFT) * PLANES
    bit = ids & (WORD - 1)
    word = tl.load(cells + word_at, mask=wanted, other=0)
    wanted = wanted & (((word >> bit) & 1) != 0)
    before = tl.load(cells + word_at + 1, mask=wanted, other=0)
    lower = word & ((bit * 0 - 1 << bit) ^ -1)
    place = tl.cdiv(vocab, WORD) * PLANES + before + count_bits(lower)
    return place, wanted & (before >= 0) & (before < room) & (place < room)


@triton.jit
def load_tile(row, ids, inside, count, end, other):
    """What lies at `ids` of a row of `count` numbers; `other` where not `inside`.

    end: behind the last of the ids, which are consecutive, so that a tile before the last one is loaded without a mask
    and in wide loads whatever the count is; None: they are no tile, or a mask keeps no load narrow.
    """
    if end is None:
        found = tl.load(row + ids, mask=inside, other=other)
    else:
        if end <= count:
            found = tl.load(row + ids)
        else:
            found = tl.load(row + ids, mask=inside, other=other)
    return found


@triton.jit
def store_tile(row, ids, values, inside, count, end):
    """Writes values to `ids` of a row of `count` numbers, where `inside`; end: as in `load_tile`."""
    if end is None:
        tl.store(row + ids, values, mask=inside)
    else:
        if end <= count:
            tl.store(row + ids, values)
        else:
            tl.store(row + ids, values, mask=inside)


@triton.jit
def load_logits(logits, cells, room, ids, inside, vocab, FOLD: tl.constexpr, end):
    """Logits of tokens `ids` (int32, any shape) of the row that starts at `logits`, float32; -inf where not `inside`.

    FOLD: as the overlay's row at `cells`, of `room` cells, has them. end: as in `load_tile`.
    """
    level = load_tile(logits, ids, inside, vocab, end, NO_LOGIT).to(tl.float32)
    if FOLD:
        place, moved = find_replacement(cells, ids, inside, vocab, room)
        value = tl.load(cells + place, mask=moved, other=0).to(tl.float32, bitcast=True)
        level = tl.where(moved, value, level)
        barred = tl.load(cells + (ids >> WORD_SHIFT) * PLANES + 2, mask=inside, other=0)
        level = tl.where(((barred >> (ids & (WORD - 1))) & 1) != 0, level + NO_LOGIT, level)
    return level
