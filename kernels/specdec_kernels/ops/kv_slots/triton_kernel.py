"""Triton kernel of kv_slots: one program per request, and one for the nodes that belong to no request.

Shapes (int32 unless said otherwise):
    page_table: [num_rows, max_pages]; lengths: [num_rows]
    rows: [num_requests]; offsets: [num_requests + 1]; depth: [num_nodes]
    batch_page_table: [num_requests, max_pages]; batch_lengths: [num_requests]
    slots, positions: int64 [num_nodes]
"""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.jit import kernel


@kernel()
def assign_slots(
    page_table_ptr, lengths_ptr, rows_ptr, offsets_ptr, depth_ptr, batch_page_table_ptr, batch_lengths_ptr, slots_ptr,
    positions_ptr, num_requests, num_nodes, num_rows, max_pages, PAGE_SIZE: tl.constexpr, ADVANCE: tl.constexpr,
    TREE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_requests + 1,).

    Nodes that do not fit and nodes of rows that do not exist get slot -1, the trash, as do all nodes of a row of
    negative length.
    """
    request = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    first = tl.minimum(tl.maximum(tl.load(offsets_ptr + request, mask=request > 0, other=0), 0), num_nodes)
    if request == num_requests:
        for start in range(first, num_nodes, BLOCK):
            node = start + index
            tl.store(slots_ptr + node, tl.full([BLOCK], -1, tl.int64), mask=node < num_nodes)
            tl.store(positions_ptr + node, tl.zeros([BLOCK], tl.int64), mask=node < num_nodes)
        return
    end = tl.maximum(tl.minimum(tl.load(offsets_ptr + request + 1), num_nodes), first)
    row = tl.load(rows_ptr + request)
    exists = (row >= 0) & (row < num_rows)
    row = tl.where(exists, row, 0).to(tl.int64)
    length = tl.load(lengths_ptr + row, mask=exists, other=0)
    tl.store(batch_lengths_ptr + request, length)
    for start in range(0, max_pages, BLOCK):
        column = start + index
        page = tl.load(page_table_ptr + row * max_pages + column, mask=exists & (column < max_pages), other=0)
        tl.store(batch_page_table_ptr + request.to(tl.int64) * max_pages + column, page, mask=column < max_pages)
    capacity = max_pages * PAGE_SIZE
    stop = tl.where(exists & (length >= 0) & (length < capacity), end, first)
    for start in range(first, end, BLOCK):
        node = start + index
        at = length + node - first
        fits = (node < stop) & (at < capacity)
        page = tl.load(page_table_ptr + row * max_pages + at // PAGE_SIZE, mask=fits, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + at % PAGE_SIZE
        position = at
        if TREE:
            position = length + tl.load(depth_ptr + node, mask=node < end, other=0)
        tl.store(slots_ptr + node, tl.where(fits, slot, -1), mask=node < end)
        tl.store(positions_ptr + node, position.to(tl.int64), mask=node < end)
    if ADVANCE:
        tl.debug_barrier()  # every warp has read the length before it is written
        tl.store(lengths_ptr + row, length + end - first, mask=exists)
