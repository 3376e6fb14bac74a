"""Triton kernels of process_logits: sparse edits of a row by one program, then whole-row edits tile by tile.

A row's path is walked up its parents wherever it is needed: it is short, and its links lie in the nearest cache. A
parent that does not precede its child ends it. Tables, masks and entries that do not exist edit nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.distribution import NEGATIVE_INFINITY
from ...triton_shared.jit import kernel
from ...triton_shared.overlay import load_tile, store_tile


@triton.jit
def entries_of(offsets, request, entries):
    """First entry of a request and the one behind its last, both within `entries`."""
    first = tl.maximum(tl.load(offsets + request), 0)
    return first, tl.minimum(tl.load(offsets + request + 1), entries)


@triton.jit
def place(nodes, offsets, parents, roots, requests, packed, NODES: tl.constexpr, REQUESTS: tl.constexpr):
    """(request, its first node, node within it, position being decided) of a row of logits; request -1 for none."""
    node = tl.program_id(0)
    if NODES:
        node = tl.load(nodes + node)
    row = tl.arange(0, REQUESTS)
    starts = tl.maximum(tl.load(offsets + row, mask=row < requests, other=0x7FFFFFFF), 0)
    ends = tl.minimum(tl.load(offsets + row + 1, mask=row < requests, other=0), packed)
    request = tl.max(tl.where((starts <= node) & (node < ends), row, -1), 0)
    start = tl.zeros((), tl.int32)
    position = tl.zeros((), tl.int64)
    if request >= 0:
        start = tl.maximum(tl.load(offsets + request), 0)
        node -= start
        position = tl.load(roots + request).to(tl.int64) + 1
        parents += start
        here = node
        parent = tl.load(parents + here)
        while (parent >= 0) & (parent < here):
            position += 1
            here = parent
            parent = tl.load(parents + here)
    return request, start, node, position


@triton.jit
def on_path(tokens, parents, node, ids):
    """How often each of `ids` (int64) is on the path of a node, int32. tokens, parents, node: of its request."""
    count = (ids * 0).to(tl.int32)
    parent = tl.load(parents + node)
    while (parent >= 0) & (parent < node):
        count += (ids == tl.load(tokens + node)).to(tl.int32)
        node = parent
        parent = tl.load(parents + node)
    return count


@triton.jit
def uncommitted(tokens, parents, node, at, token, committed, used, vocab, TILE: tl.constexpr):
    """How often the token of `at` is on the path of a node, and whether penalties must look for it there: it is none of
    the `used` that were committed, and on no node of the path further down."""
    total = on_path(tokens, parents, node, token)
    upwards = on_path(tokens, parents, at, token)
    lane = tl.arange(0, TILE)
    listings = tl.zeros((TILE,), tl.int32)
    for first in range(0, used, TILE):
        listed = tl.load(committed + first + lane, mask=first + lane < used, other=-1)
        listings += (listed == token).to(tl.int32)
    return total, (upwards == total) & (tl.sum(listings, 0) == 0) & (token >= 0) & (token < vocab)


@triton.jit
def penalised(level, count, repetition, presence, frequency):
    """A logit after the penalties, in float32."""
    level = tl.where(level < 0, level * repetition, tl.math.div_rn(level, repetition))
    level = level - frequency * count.to(tl.float32)
    return tl.where(count > 0, level - presence, level)


@kernel()
def sparse(
    logits, tokens, parents, offsets, roots, nodes, factors, rows, ids, counts, sizes, add_offsets, add_ids, values,
    until, requests, packed, tables, entries, vocab, stride, capacity, TILE: tl.constexpr, REQUESTS: tl.constexpr,
    NODES: tl.constexpr, PENALTIES: tl.constexpr, ADDITIONS: tl.constexpr,
):  # fmt: skip
    """Penalties and additions of one row."""
    request, start, node, position = place(nodes, offsets, parents, roots, requests, packed, NODES, REQUESTS)
    if request >= 0:
        logits += tl.program_id(0).to(tl.int64) * stride
        tokens += start
        parents += start
        lane = tl.arange(0, TILE)
        if PENALTIES:
            repetition = tl.load(factors + 3 * request)
            presence, frequency = tl.load(factors + 3 * request + 1), tl.load(factors + 3 * request + 2)
            table = tl.load(rows + request)
            known = (table >= 0) & (table < tables)
            used = tl.minimum(tl.load(sizes + table, mask=known, other=0), capacity)
            own = ids + table.to(tl.int64) * capacity
            own_counts = counts + table.to(tl.int64) * capacity
            # tokens of the path that were never committed; each at its last place there
            at = node
            parent = tl.load(parents + at)
            while (parent >= 0) & (parent < at):
                token = tl.load(tokens + at)
                total, fresh = uncommitted(tokens, parents, node, at, token, own, used, vocab, TILE)
                level = tl.load(logits + token, mask=fresh, other=0.0).to(tl.float32)
                changed = penalised(level, total, repetition, presence, frequency)
                tl.store(logits + token, changed.to(logits.dtype.element_ty), mask=fresh)
                at = parent
                parent = tl.load(parents + at)
            for first in range(0, used, TILE):
                token = tl.load(own + first + lane, mask=first + lane < used, other=-1).to(tl.int64)
                total = tl.load(own_counts + first + lane, mask=first + lane < used, other=0)
                total += on_path(tokens, parents, node, token)
                wanted = (token >= 0) & (token < vocab)
                level = tl.load(logits + token, mask=wanted, other=0.0).to(tl.float32)
                changed = penalised(level, total, repetition, presence, frequency)
                tl.store(logits + token, changed.to(logits.dtype.element_ty), mask=wanted)
            tl.debug_barrier()
        if ADDITIONS:
            begin, end = entries_of(add_offsets, request, entries)
            # finite values first: their ids are distinct, while what is forbidden may be listed again
            for forbidding in range(2):
                for first in range(begin, end, TILE):
                    inside = first + lane < end
                    token = tl.load(add_ids + first + lane, mask=inside, other=-1)
                    value = tl.load(values + first + lane, mask=inside, other=0.0)
                    last = tl.load(until + first + lane, mask=inside, other=0)
                    wanted = (token >= 0) & (token < vocab) & (position < last)
                    wanted = wanted & ((value == NEGATIVE_INFINITY) == (forbidding == 1))
                    level = tl.load(logits + token, mask=wanted, other=0.0).to(tl.float32)
                    tl.store(logits + token, (level + value).to(logits.dtype.element_ty), mask=wanted)
                tl.debug_barrier()


@kernel("logits", "vocab", "stride")
def whole(
    logits, tokens, parents, offsets, roots, nodes, forced_offsets, forced_positions, forced_ids, words, index,
    requests, packed, entries, masks, vocab, stride, width, TILE: tl.constexpr, REQUESTS: tl.constexpr,
    NODES: tl.constexpr, FORCED: tl.constexpr, MASKS: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Forced tokens and the mask of one tile of a row. A tile with a barred token is read and written whole, in wide
    loads and stores; its other tokens keep their bits."""
    request, _, _, position = place(nodes, offsets, parents, roots, requests, packed, NODES, REQUESTS)
    if request >= 0:
        row = tl.program_id(0).to(tl.int64)
        word_at, bit = tl.program_id(1) * (TILE // 32) + tl.arange(0, TILE // 32), tl.arange(0, 32)
        ids = word_at[:, None] * 32 + bit[None, :]
        inside = ids < vocab
        barred = ids < 0
        if FORCED:
            begin, end = entries_of(forced_offsets, request, entries)
            for entry in range(begin, end):
                here = tl.load(forced_positions + entry).to(tl.int64) == position
                barred = barred | (here & (ids != tl.load(forced_ids + entry)))
        if MASKS:
            mask = tl.load(index + row)
            if (mask >= 0) & (mask < masks):
                word = tl.load(words + mask.to(tl.int64) * width + word_at, mask=word_at * 32 < vocab, other=-1)
                barred = barred | (((word[:, None] >> bit[None, :]) & 1) == 0)
        barred = barred & inside
        if tl.max(tl.max(barred.to(tl.int32), 1), 0) > 0:
            logits += row * stride
            end = (tl.program_id(1) + 1) * TILE
            level = load_tile(logits, ids, inside, vocab, end if UNALIGNED else None, 0.0)
            # adding -inf keeps NaN, and turns +inf into NaN: broken rows stay visible
            refused = (level.to(tl.float32) + NEGATIVE_INFINITY).to(logits.dtype.element_ty)
            store_tile(logits, ids, tl.where(barred, refused, level), inside, vocab, end if UNALIGNED else None)
