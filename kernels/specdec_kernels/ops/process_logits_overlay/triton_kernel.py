"""Triton kernel of process_logits_overlay: one program writes a row's cells, from its bits to the logits behind them.

Tables, masks and entries that do not exist edit nothing; a parent that does not precede its child ends a path. Every
listed token has its bit before anything is counted, so its cell lies within the row's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.distribution import NEGATIVE_INFINITY
from ...triton_shared.jit import kernel
from ...triton_shared.overlay import PLANES, WORD, count_bits, find_replacement
from ..process_logits.triton_kernel import entries_of, on_path, penalised, place, uncommitted


@triton.jit
def bit_of(token):
    """The bit of a token in its word."""
    return (token * 0 + 1).to(tl.int32) << (token % WORD).to(tl.int32)


@triton.jit
def mark(cells, plane: tl.constexpr, token, wanted):
    """Sets the bits of tokens in a plane."""
    token = tl.where(wanted, token, 0)
    tl.atomic_or(cells + (token // WORD) * PLANES + plane, bit_of(token), mask=wanted, sem="relaxed")


@triton.jit
def put(cells, token, value, wanted, vocab, room):
    """Writes other logits of tokens that have their bits."""
    where, known = find_replacement(cells, token.to(tl.int32), wanted, vocab, room)
    tl.store(cells + where, value.to(tl.int32, bitcast=True), mask=known)


@kernel()
def fold(
    logits, tokens, parents, offsets, roots, nodes, factors, rows, ids, counts, sizes, add_offsets, add_ids, values,
    until, forced_offsets, forced_positions, forced_ids, words, index, cells, requests, packed, tables, entries, listed,
    masks, vocab, stride, capacity, width, room, TILE: tl.constexpr, WORDS: tl.constexpr, REQUESTS: tl.constexpr,
    NODES: tl.constexpr, PENALTIES: tl.constexpr, ADDITIONS: tl.constexpr, FORCED: tl.constexpr, MASKS: tl.constexpr,
):  # fmt: skip
    """The cells of one row."""
    request, start, node, position = place(nodes, offsets, parents, roots, requests, packed, NODES, REQUESTS)
    row = tl.program_id(0).to(tl.int64)
    cells += row * room
    count = tl.cdiv(vocab, WORD)
    lane, step = tl.arange(0, TILE), tl.arange(0, WORDS)
    mask_of = tl.full((), -1, tl.int32)
    if MASKS:
        mask_of = tl.load(index + row)
    for first in range(0, count, WORDS):
        word_at = first + step
        barred = tl.zeros((WORDS,), tl.int32)
        if request >= 0:
            if FORCED:
                begin, end = entries_of(forced_offsets, request, listed)
                for entry in range(begin, end):
                    if tl.load(forced_positions + entry).to(tl.int64) == position:
                        token = tl.load(forced_ids + entry)
                        own = (token >= 0) & (token // WORD == word_at)
                        barred = barred | tl.where(own, bit_of(token) ^ -1, -1)
            if MASKS:  # noqa: SIM102 (known when compiling)
                if (mask_of >= 0) & (mask_of < masks):
                    allowed = tl.load(words + mask_of.to(tl.int64) * width + word_at, mask=word_at < count, other=-1)
                    barred = barred | (allowed ^ -1)
        left = vocab - word_at * WORD  # tokens of the word
        inside = tl.where(left < WORD, (step * 0 - 1 << tl.minimum(tl.maximum(left, 0), 31)) ^ -1, -1)
        tl.store(cells + word_at * PLANES, step * 0, mask=word_at < count)
        tl.store(cells + word_at * PLANES + 2, barred & inside, mask=word_at < count)
    for first in range(count * PLANES, room, TILE):
        tl.store(cells + first + lane, lane * 0, mask=first + lane < room)
    tl.debug_barrier()
    # of the request's penalties; the places are walked twice
    counting = request < -1
    repetition = tl.full((), 1.0, tl.float32)
    presence = tl.zeros((), tl.float32)
    frequency = tl.zeros((), tl.float32)
    used = tl.zeros((), tl.int32)
    own_ids = ids
    own_counts = counts
    if request >= 0:
        logits += row * stride
        tokens += start
        parents += start
        if PENALTIES:
            repetition = tl.load(factors + 3 * request)
            presence = tl.load(factors + 3 * request + 1)
            frequency = tl.load(factors + 3 * request + 2)
            counting = (repetition != 1) | (presence != 0) | (frequency != 0)
            table = tl.load(rows + request)
            known = counting & (table >= 0) & (table < tables)
            used = tl.minimum(tl.load(sizes + table, mask=known, other=0), capacity)
            own_ids += table.to(tl.int64) * capacity
            own_counts += table.to(tl.int64) * capacity
            for first in range(0, used, TILE):
                token = tl.load(own_ids + first + lane, mask=first + lane < used, other=-1)
                mark(cells, 0, token, (token >= 0) & (token < vocab))
            at = node
            parent = tl.load(parents + at)
            while counting & (parent >= 0) & (parent < at):
                token = tl.load(tokens + at)
                mark(cells, 0, token, (token >= 0) & (token < vocab))
                at = parent
                parent = tl.load(parents + at)
        if ADDITIONS:
            begin, end = entries_of(add_offsets, request, entries)
            for first in range(begin, end, TILE):
                inside = first + lane < end
                token = tl.load(add_ids + first + lane, mask=inside, other=-1)
                value = tl.load(values + first + lane, mask=inside, other=0.0)
                here = position < tl.load(until + first + lane, mask=inside, other=0)
                wanted = (token >= 0) & (token < vocab) & here
                mark(cells, 0, token, wanted & (value != NEGATIVE_INFINITY))
                mark(cells, 2, token, wanted & (value == NEGATIVE_INFINITY))
    tl.debug_barrier()
    before = tl.zeros((), tl.int32)
    for first in range(0, count, WORDS):
        word_at = first + step
        word = tl.load(cells + word_at * PLANES, mask=word_at < count, other=0)
        own = count_bits(word & 0x7FFFFFFF) + (word < 0).to(tl.int32)
        tl.store(cells + word_at * PLANES + 1, before + tl.cumsum(own, 0) - own, mask=word_at < count)
        before += tl.sum(own, 0)
    tl.debug_barrier()
    if request >= 0:
        if ADDITIONS:  # of what has a bias and perhaps no penalty
            begin, end = entries_of(add_offsets, request, entries)
            for first in range(begin, end, TILE):
                token = tl.load(add_ids + first + lane, mask=first + lane < end, other=-1)
                wanted = (token >= 0) & (token < vocab)
                level = tl.load(logits + token, mask=wanted, other=0.0).to(tl.float32)
                put(cells, token, level, wanted, vocab, room)
            tl.debug_barrier()
        if PENALTIES:
            # tokens of the path that were never committed; each at its last place there
            at = node
            parent = tl.load(parents + at)
            while counting & (parent >= 0) & (parent < at):
                token = tl.load(tokens + at)
                total, fresh = uncommitted(tokens, parents, node, at, token, own_ids, used, vocab, TILE)
                level = tl.load(logits + token, mask=fresh, other=0.0).to(tl.float32)
                put(cells, token, penalised(level, total, repetition, presence, frequency), fresh, vocab, room)
                at = parent
                parent = tl.load(parents + at)
            for first in range(0, used, TILE):
                token = tl.load(own_ids + first + lane, mask=first + lane < used, other=-1).to(tl.int64)
                total = tl.load(own_counts + first + lane, mask=first + lane < used, other=0)
                total += on_path(tokens, parents, node, token)
                wanted = (token >= 0) & (token < vocab)
                level = tl.load(logits + token, mask=wanted, other=0.0).to(tl.float32)
                put(cells, token, penalised(level, total, repetition, presence, frequency), wanted, vocab, room)
            tl.debug_barrier()
        if ADDITIONS:
            begin, end = entries_of(add_offsets, request, entries)
            for first in range(begin, end, TILE):
                inside = first + lane < end
                token = tl.load(add_ids + first + lane, mask=inside, other=-1)
                value = tl.load(values + first + lane, mask=inside, other=0.0)
                here = position < tl.load(until + first + lane, mask=inside, other=0)
                wanted = (token >= 0) & (token < vocab) & here & (value != NEGATIVE_INFINITY)
                where, known = find_replacement(cells, token, wanted, vocab, room)
                level = tl.load(cells + where, mask=known, other=0).to(tl.float32, bitcast=True)
                tl.store(cells + where, (level + value).to(tl.int32, bitcast=True), mask=known)
