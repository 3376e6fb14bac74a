"""Triton kernels of process_logits: penalties and additions by one program per row, then forbidden tokens by tiles.

A node's path is walked up its parents wherever it is needed: it is short, and its links stay in the nearest cache. A
parent that does not precede its child ends it. Tables, masks and entries that do not exist change nothing.

Shapes: R rows of logits, V = vocab_size, N = num_nodes packed nodes of B = num_requests requests.
    logits_ptr [R, V], row stride logits_stride
    tokens_ptr int64 [N], parents_ptr int32 [N], within the request, -1 for its root
    offsets_ptr int32 [B + 1], root_positions_ptr int32 [B]
    nodes_ptr int32 [R], node that each row follows (read if HAS_NODES)
    factors_ptr float32 [B, 3], table_rows_ptr int32 [B]: penalties, row of the tables below
    table_ids_ptr, table_counts_ptr int32 [num_tables, table_capacity], table_sizes_ptr int32 [num_tables]
    add_offsets_ptr int32 [B + 1]; add_ids_ptr, add_until_ptr int32 [num_additions]; add_values_ptr float32
    forced_offsets_ptr int32 [B + 1]; forced_positions_ptr, forced_ids_ptr int32 [num_forced]
    mask_words_ptr int32 [num_masks, mask_words], mask_index_ptr int32 [R]
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.distribution import NEGATIVE_INFINITY
from ...triton_shared.jit import kernel
from ...triton_shared.overlay import load_tile, store_tile


@triton.jit
def entry_bounds(offsets_ptr, request, num_entries):
    """Returns first entry and end of a request, both within `num_entries`."""
    first = tl.maximum(tl.load(offsets_ptr + request), 0)
    return first, tl.minimum(tl.load(offsets_ptr + request + 1), num_entries)


@triton.jit
def locate_row(
    nodes_ptr, offsets_ptr, parents_ptr, root_positions_ptr, num_requests, num_nodes, HAS_NODES: tl.constexpr,
    REQUESTS: tl.constexpr,
):  # fmt: skip
    """(request, its first node, node within it, position to decide) of a row of logits; request -1 for none."""
    node = tl.program_id(0)
    if HAS_NODES:
        node = tl.load(nodes_ptr + node)
    row = tl.arange(0, REQUESTS)
    starts = tl.maximum(tl.load(offsets_ptr + row, mask=row < num_requests, other=0x7FFFFFFF), 0)
    ends = tl.minimum(tl.load(offsets_ptr + row + 1, mask=row < num_requests, other=0), num_nodes)
    request = tl.max(tl.where((starts <= node) & (node < ends), row, -1), 0)
    start = tl.zeros((), tl.int32)
    position = tl.zeros((), tl.int64)
    if request >= 0:
        start = tl.maximum(tl.load(offsets_ptr + request), 0)
        node -= start
        position = tl.load(root_positions_ptr + request).to(tl.int64) + 1
        parents_ptr += start
        here = node
        parent = tl.load(parents_ptr + here)
        while (parent >= 0) & (parent < here):
            position += 1
            here = parent
            parent = tl.load(parents_ptr + here)
    return request, start, node, position


@triton.jit
def count_on_path(tokens_ptr, parents_ptr, node, ids):
    """How often each of `ids` (int64) is on the path of a node, int32. Pointers and node: of its request."""
    count = (ids * 0).to(tl.int32)
    parent = tl.load(parents_ptr + node)
    while (parent >= 0) & (parent < node):
        count += (ids == tl.load(tokens_ptr + node)).to(tl.int32)
        node = parent
        parent = tl.load(parents_ptr + node)
    return count


@triton.jit
def count_uncommitted(
    tokens_ptr, parents_ptr, node, at, token, committed_ptr, num_committed, vocab_size, TILE: tl.constexpr
):
    """Counts the token of node `at` on the path of a node.

    The penalty of a token that was never committed is applied once: at its first node on the way up from the node.

    Returns:
        The count, and whether the penalty is applied at `at`.
    """
    total = count_on_path(tokens_ptr, parents_ptr, node, token)
    upwards = count_on_path(tokens_ptr, parents_ptr, at, token)
    lane = tl.arange(0, TILE)
    listings = tl.zeros((TILE,), tl.int32)
    for first in range(0, num_committed, TILE):
        listed = tl.load(committed_ptr + first + lane, mask=first + lane < num_committed, other=-1)
        listings += (listed == token).to(tl.int32)
    return total, (upwards == total) & (tl.sum(listings, 0) == 0) & (token >= 0) & (token < vocab_size)


@triton.jit
def penalise(level, count, repetition, presence, frequency):
    """A logit after the penalties, in float32."""
    level = tl.where(level < 0, level * repetition, tl.math.div_rn(level, repetition))
    level = level - frequency * count.to(tl.float32)
    return tl.where(count > 0, level - presence, level)


@kernel()
def apply_sparse(
    logits_ptr, tokens_ptr, parents_ptr, offsets_ptr, root_positions_ptr, nodes_ptr, factors_ptr, table_rows_ptr,
    table_ids_ptr, table_counts_ptr, table_sizes_ptr, add_offsets_ptr, add_ids_ptr, add_values_ptr, add_until_ptr,
    num_requests, num_nodes, num_tables, num_additions, vocab_size, logits_stride, table_capacity, TILE: tl.constexpr,
    REQUESTS: tl.constexpr, HAS_NODES: tl.constexpr, HAS_PENALTIES: tl.constexpr, HAS_ADDITIONS: tl.constexpr,
):  # fmt: skip
    """Grid (R): penalties and additions of one row. REQUESTS: at least B."""
    request, start, node, position = locate_row(
        nodes_ptr, offsets_ptr, parents_ptr, root_positions_ptr, num_requests, num_nodes, HAS_NODES, REQUESTS
    )
    if request >= 0:
        logits_ptr += tl.program_id(0).to(tl.int64) * logits_stride
        tokens_ptr += start
        parents_ptr += start
        lane = tl.arange(0, TILE)
        if HAS_PENALTIES:
            repetition = tl.load(factors_ptr + 3 * request)
            presence, frequency = tl.load(factors_ptr + 3 * request + 1), tl.load(factors_ptr + 3 * request + 2)
            table = tl.load(table_rows_ptr + request)
            exists = (table >= 0) & (table < num_tables)
            num_committed = tl.minimum(tl.load(table_sizes_ptr + table, mask=exists, other=0), table_capacity)
            own_ids_ptr = table_ids_ptr + table.to(tl.int64) * table_capacity
            own_counts_ptr = table_counts_ptr + table.to(tl.int64) * table_capacity
            # tokens of the path that were never committed; each at its last place there
            at = node
            parent = tl.load(parents_ptr + at)
            while (parent >= 0) & (parent < at):
                token = tl.load(tokens_ptr + at)
                total, fresh = count_uncommitted(
                    tokens_ptr, parents_ptr, node, at, token, own_ids_ptr, num_committed, vocab_size, TILE
                )
                level = tl.load(logits_ptr + token, mask=fresh, other=0.0).to(tl.float32)
                changed = penalise(level, total, repetition, presence, frequency)
                tl.store(logits_ptr + token, changed.to(logits_ptr.dtype.element_ty), mask=fresh)
                at = parent
                parent = tl.load(parents_ptr + at)
            for first in range(0, num_committed, TILE):
                inside = first + lane < num_committed
                token = tl.load(own_ids_ptr + first + lane, mask=inside, other=-1).to(tl.int64)
                total = tl.load(own_counts_ptr + first + lane, mask=inside, other=0)
                total += count_on_path(tokens_ptr, parents_ptr, node, token)
                wanted = (token >= 0) & (token < vocab_size)
                level = tl.load(logits_ptr + token, mask=wanted, other=0.0).to(tl.float32)
                changed = penalise(level, total, repetition, presence, frequency)
                tl.store(logits_ptr + token, changed.to(logits_ptr.dtype.element_ty), mask=wanted)
            tl.debug_barrier()
        if HAS_ADDITIONS:
            begin, end = entry_bounds(add_offsets_ptr, request, num_additions)
            # finite values first: their ids are distinct, while forbidden ids may be listed again
            for forbidding in range(2):
                for first in range(begin, end, TILE):
                    inside = first + lane < end
                    token = tl.load(add_ids_ptr + first + lane, mask=inside, other=-1)
                    value = tl.load(add_values_ptr + first + lane, mask=inside, other=0.0)
                    until = tl.load(add_until_ptr + first + lane, mask=inside, other=0)
                    wanted = (token >= 0) & (token < vocab_size) & (position < until)
                    wanted = wanted & ((value == NEGATIVE_INFINITY) == (forbidding == 1))
                    level = tl.load(logits_ptr + token, mask=wanted, other=0.0).to(tl.float32)
                    tl.store(logits_ptr + token, (level + value).to(logits_ptr.dtype.element_ty), mask=wanted)
                tl.debug_barrier()


@kernel("logits_ptr", "vocab_size", "logits_stride")
def forbid_tokens(
    logits_ptr, tokens_ptr, parents_ptr, offsets_ptr, root_positions_ptr, nodes_ptr, forced_offsets_ptr,
    forced_positions_ptr, forced_ids_ptr, mask_words_ptr, mask_index_ptr, num_requests, num_nodes, num_forced,
    num_masks, vocab_size, logits_stride, mask_words, TILE: tl.constexpr, REQUESTS: tl.constexpr,
    HAS_NODES: tl.constexpr, HAS_FORCED: tl.constexpr, HAS_MASKS: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (R, ceil(V / TILE)): forced tokens and the mask of one tile of a row.

    A tile with a forbidden token is read and written whole, in wide loads and stores; its other tokens keep their bits.
    """
    request, _, _, position = locate_row(
        nodes_ptr, offsets_ptr, parents_ptr, root_positions_ptr, num_requests, num_nodes, HAS_NODES, REQUESTS
    )
    if request >= 0:
        row = tl.program_id(0).to(tl.int64)
        word_at, bit = tl.program_id(1) * (TILE // 32) + tl.arange(0, TILE // 32), tl.arange(0, 32)
        ids = word_at[:, None] * 32 + bit[None, :]
        inside = ids < vocab_size
        forbidden = ids < 0
        if HAS_FORCED:
            begin, end = entry_bounds(forced_offsets_ptr, request, num_forced)
            for entry in range(begin, end):
                here = tl.load(forced_positions_ptr + entry).to(tl.int64) == position
                forbidden = forbidden | (here & (ids != tl.load(forced_ids_ptr + entry)))
        if HAS_MASKS:
            mask = tl.load(mask_index_ptr + row)
            if (mask >= 0) & (mask < num_masks):
                word = tl.load(
                    mask_words_ptr + mask.to(tl.int64) * mask_words + word_at, mask=word_at * 32 < vocab_size, other=-1
                )
                forbidden = forbidden | (((word[:, None] >> bit[None, :]) & 1) == 0)
        forbidden = forbidden & inside
        if tl.max(tl.max(forbidden.to(tl.int32), 1), 0) > 0:
            logits_ptr += row * logits_stride
            tile_end = (tl.program_id(1) + 1) * TILE
            level = load_tile(logits_ptr, ids, inside, vocab_size, tile_end if UNALIGNED else None, 0.0)
            # adding -inf keeps NaN, and turns +inf into NaN: rows without a distribution stay visible
            barred = (level.to(tl.float32) + NEGATIVE_INFINITY).to(logits_ptr.dtype.element_ty)
            level = tl.where(forbidden, barred, level)
            store_tile(logits_ptr, ids, level, inside, vocab_size, tile_end if UNALIGNED else None)
