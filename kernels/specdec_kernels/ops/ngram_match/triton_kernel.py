"""Triton kernels of ngram_match: pieces of a history are searched side by side, then the best place is copied from.

A place is the number of tokens before the one that followed. The best place is the largest of keys that hold how good
it is in their upper 32 bits and the place itself in the lower, so that of equals the last one wins in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.jit import kernel


@triton.jit
def history_of(starts, lengths, row, size):
    """Start and length of a history; the length is 0 where it would leave the tokens."""
    start, length = tl.load(starts + row), tl.load(lengths + row)
    return start, tl.where((start >= 0) & (length >= 0) & (start <= size - length), length, 0)


@triton.jit
def matches(history, place, length, most):
    """How many tokens before each place equal the newest ones, up to `most`."""
    alive = (place > 0) & (place < length)
    same = tl.zeros_like(place)
    step = 0
    while (step < most) & (tl.max(alive.to(tl.int32), 0) > 0):
        newest = tl.load(history + length - 1 - step)
        alive = alive & (place > step)
        alive = alive & (tl.load(history + place - 1 - step, mask=alive, other=0) == newest)
        same += alive.to(tl.int32)
        step += 1
    return same


@triton.jit
def best_of(keys, row, pieces, MOST: tl.constexpr):
    """The largest of what the pieces of a history found; there are at most MOST."""
    piece = tl.arange(0, MOST)
    return tl.max(tl.load(keys + row * pieces + piece, mask=piece < pieces, other=0), 0)


@kernel()
def search(tokens, starts, lengths, best, size, n_max, n_min, TILE: tl.constexpr):
    """Grid (histories, pieces): the longest match of every pieces-th tile, 0 for none of n_min tokens."""
    row, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    start, length = history_of(starts, lengths, row, size)
    found = tl.zeros((), tl.int64)
    for first in range(piece * TILE, length, pieces * TILE):
        place = first + tl.arange(0, TILE)
        same = matches(tokens + start, place, length, n_max)
        key = (same.to(tl.int64) << 32) | place.to(tl.int64)
        found = tl.maximum(found, tl.max(tl.where(same >= n_min, key, 0), 0))
    tl.store(best + row * pieces + piece, found)


@kernel()
def count(tokens, starts, lengths, best, counts, size, MOST: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr):
    """Grid (histories, pieces): of the places with the longest match in every pieces-th block of ROWS, the one whose
    next token follows most of them."""
    row, piece, pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    start, length = history_of(starts, lengths, row, size)
    history = tokens + start
    longest = (best_of(best, row, pieces, MOST) >> 32).to(tl.int32)
    length = tl.where(longest > 0, length, 0)
    found = tl.zeros((), tl.int64)
    for first in range(piece * ROWS, length, pieces * ROWS):
        place = first + tl.arange(0, ROWS)
        mine = matches(history, place, length, longest) == longest
        if tl.max(mine.to(tl.int32), 0) > 0:
            following = tl.load(history + place, mask=mine, other=0)
            number = tl.zeros([ROWS], tl.int32)
            for other in range(0, length, TILE):
                there = other + tl.arange(0, TILE)
                theirs = matches(history, there, length, longest) == longest
                if tl.max(theirs.to(tl.int32), 0) > 0:
                    followed = tl.load(history + there, mask=theirs, other=0)
                    equal = (following[:, None] == followed[None, :]) & theirs[None, :]
                    number += tl.sum(equal.to(tl.int32), 1)
            key = (number.to(tl.int64) << 32) | place.to(tl.int64)
            found = tl.maximum(found, tl.max(tl.where(mine, key, 0), 0))
    tl.store(counts + row * pieces + piece, found)


@kernel()
def copy(
    tokens, starts, lengths, best, counts, drafts, matched, size, num_tokens, pieces,
    MOST: tl.constexpr, FREQUENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (histories): what follows the best place, over and over if the history ends before the draft does."""
    row = tl.program_id(0).to(tl.int64)
    start, length = history_of(starts, lengths, row, size)
    key = best_of(best, row, pieces, MOST)
    same = (key >> 32).to(tl.int32)
    if FREQUENT:
        key = best_of(counts, row, pieces, MOST)
    place = (key & 0x7FFFFFFF).to(tl.int32)
    tl.store(matched + row, same)
    for first in range(0, num_tokens, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < num_tokens
        from_place = place + index % tl.maximum(length - place, 1)
        token = tl.load(tokens + start + from_place, mask=inside & (same > 0), other=-1)
        tl.store(drafts + row * num_tokens + index, token, mask=inside)
