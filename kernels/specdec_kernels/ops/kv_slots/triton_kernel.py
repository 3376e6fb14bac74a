"""Triton kernel of kv_slots: one program per request, and one for the nodes that belong to none."""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.jit import kernel


@kernel()
def place(
    page_table, lengths, rows, offsets, depth, own_table, own_lengths, slots, positions,
    batch, nodes, capacity, columns,
    PAGE: tl.constexpr, ADVANCE: tl.constexpr, TREE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (batch + 1). Nodes without room, and those of rows that do not exist, go to the trash (-1), as do all of a
    row of negative length."""
    request = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    first = tl.minimum(tl.maximum(tl.load(offsets + request, mask=request > 0, other=0), 0), nodes)
    if request == batch:
        for start in range(first, nodes, BLOCK):
            node = start + lane
            tl.store(slots + node, tl.full([BLOCK], -1, tl.int64), mask=node < nodes)
            tl.store(positions + node, tl.zeros([BLOCK], tl.int64), mask=node < nodes)
        return
    end = tl.maximum(tl.minimum(tl.load(offsets + request + 1), nodes), first)
    row = tl.load(rows + request)
    known = (row >= 0) & (row < capacity)
    row = tl.where(known, row, 0).to(tl.int64)
    length = tl.load(lengths + row, mask=known, other=0)
    tl.store(own_lengths + request, length)
    for start in range(0, columns, BLOCK):
        column = start + lane
        page = tl.load(page_table + row * columns + column, mask=known & (column < columns), other=0)
        tl.store(own_table + request.to(tl.int64) * columns + column, page, mask=column < columns)
    room = columns * PAGE
    stop = tl.where(known & (length >= 0) & (length < room), end, first)
    for start in range(first, end, BLOCK):
        node = start + lane
        at = length + node - first
        held = (node < stop) & (at < room)
        page = tl.load(page_table + row * columns + at // PAGE, mask=held, other=0)
        slot = page.to(tl.int64) * PAGE + at % PAGE
        position = at
        if TREE:
            position = length + tl.load(depth + node, mask=node < end, other=0)
        tl.store(slots + node, tl.where(held, slot, -1), mask=node < end)
        tl.store(positions + node, position.to(tl.int64), mask=node < end)
    if ADVANCE:
        tl.debug_barrier()  # every warp reads the length for itself, and one writes it
        tl.store(lengths + row, length + end - first, mask=known)
