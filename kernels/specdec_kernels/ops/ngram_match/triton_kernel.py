"""Triton kernels of ngram_match: programs search pieces of a history, then one copies what follows the best position.

A position is the number of tokens before the one that followed an earlier occurrence. The best position is the largest
of 64-bit keys that hold its score in the upper 32 bits and the position in the lower 32. Of equal scores the last
position wins, in any order of programs.

Shapes (int64 unless said otherwise):
    tokens: [num_tokens]; starts: [num_requests]; lengths: int32 [num_requests]
    best, counts: [num_requests, num_pieces], keys of the pieces
    drafts: [num_requests, num_drafts]; matched: int32 [num_requests]
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.jit import kernel


@triton.jit
def load_history(starts_ptr, lengths_ptr, row, num_tokens):
    """Returns start and length of a history; the length is 0 if the history would leave the tokens."""
    start, length = tl.load(starts_ptr + row), tl.load(lengths_ptr + row)
    return start, tl.where((start >= 0) & (length >= 0) & (start <= num_tokens - length), length, 0)


@triton.jit
def match_lengths(history_ptr, position, length, max_length):
    """Returns how many tokens before each position equal the newest ones, up to `max_length`."""
    alive = (position > 0) & (position < length)
    matched = tl.zeros_like(position)
    step = 0
    while (step < max_length) & (tl.max(alive.to(tl.int32), 0) > 0):
        newest = tl.load(history_ptr + length - 1 - step)
        alive = alive & (position > step)
        alive = alive & (tl.load(history_ptr + position - 1 - step, mask=alive, other=0) == newest)
        matched += alive.to(tl.int32)
        step += 1
    return matched


@triton.jit
def load_best_key(keys_ptr, row, num_pieces, MAX_PIECES: tl.constexpr):
    """Returns the largest key of the pieces of a history, of which there are at most MAX_PIECES."""
    piece = tl.arange(0, MAX_PIECES)
    return tl.max(tl.load(keys_ptr + row * num_pieces + piece, mask=piece < num_pieces, other=0), 0)


@kernel()
def find_longest(tokens_ptr, starts_ptr, lengths_ptr, best_ptr, num_tokens, n_max, n_min, TILE: tl.constexpr):
    """Finds the longest match in every num_pieces-th tile; key 0 if none has n_min tokens.

    Grid: (num_requests, num_pieces).
    """
    row, piece, num_pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    start, length = load_history(starts_ptr, lengths_ptr, row, num_tokens)
    found = tl.zeros((), tl.int64)
    for first in range(piece * TILE, length, num_pieces * TILE):
        position = first + tl.arange(0, TILE)
        matched = match_lengths(tokens_ptr + start, position, length, n_max)
        key = (matched.to(tl.int64) << 32) | position.to(tl.int64)
        found = tl.maximum(found, tl.max(tl.where(matched >= n_min, key, 0), 0))
    tl.store(best_ptr + row * num_pieces + piece, found)


@kernel()
def count_followers(
    tokens_ptr, starts_ptr, lengths_ptr, best_ptr, counts_ptr, num_tokens,
    MAX_PIECES: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Finds, among the positions of the longest match, the one whose next token follows most of them.

    Grid: (num_requests, num_pieces). A program searches every num_pieces-th block of ROWS positions.
    """
    row, piece, num_pieces = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    start, length = load_history(starts_ptr, lengths_ptr, row, num_tokens)
    history_ptr = tokens_ptr + start
    longest = (load_best_key(best_ptr, row, num_pieces, MAX_PIECES) >> 32).to(tl.int32)
    length = tl.where(longest > 0, length, 0)
    found = tl.zeros((), tl.int64)
    for first in range(piece * ROWS, length, num_pieces * ROWS):
        position = first + tl.arange(0, ROWS)
        is_match = match_lengths(history_ptr, position, length, longest) == longest
        if tl.max(is_match.to(tl.int32), 0) > 0:
            following = tl.load(history_ptr + position, mask=is_match, other=0)
            count = tl.zeros([ROWS], tl.int32)
            for other in range(0, length, TILE):
                other_position = other + tl.arange(0, TILE)
                other_is_match = match_lengths(history_ptr, other_position, length, longest) == longest
                if tl.max(other_is_match.to(tl.int32), 0) > 0:
                    other_following = tl.load(history_ptr + other_position, mask=other_is_match, other=0)
                    equal = (following[:, None] == other_following[None, :]) & other_is_match[None, :]
                    count += tl.sum(equal.to(tl.int32), 1)
            key = (count.to(tl.int64) << 32) | position.to(tl.int64)
            found = tl.maximum(found, tl.max(tl.where(is_match, key, 0), 0))
    tl.store(counts_ptr + row * num_pieces + piece, found)


@kernel()
def copy_continuation(
    tokens_ptr, starts_ptr, lengths_ptr, best_ptr, counts_ptr, drafts_ptr, matched_ptr, num_tokens, num_drafts,
    num_pieces, MAX_PIECES: tl.constexpr, FREQUENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies what follows the best position, repeatedly if the history ends before the draft does.

    Grid: (num_requests,).
    """
    row = tl.program_id(0).to(tl.int64)
    start, length = load_history(starts_ptr, lengths_ptr, row, num_tokens)
    key = load_best_key(best_ptr, row, num_pieces, MAX_PIECES)
    matched = (key >> 32).to(tl.int32)
    if FREQUENT:
        key = load_best_key(counts_ptr, row, num_pieces, MAX_PIECES)
    position = (key & 0x7FFFFFFF).to(tl.int32)
    tl.store(matched_ptr + row, matched)
    for first in range(0, num_drafts, BLOCK):
        index = first + tl.arange(0, BLOCK)
        inside = index < num_drafts
        source = position + index % tl.maximum(length - position, 1)
        token = tl.load(tokens_ptr + start + source, mask=inside & (matched > 0), other=-1)
        tl.store(drafts_ptr + row * num_drafts + index, token, mask=inside)
