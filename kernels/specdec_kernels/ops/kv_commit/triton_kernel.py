"""Triton kernels of the commits: all caches in one launch, through their tables of addresses and strides.

Shapes (int32 unless said otherwise):
    layout, scratch: int64 [caches, 6], see `slot_layout` in `cache_table.py`
    page_table: [num_requests, max_pages]; lengths, num_accepted, rows: [num_requests]
    path: [num_requests, path_width]; offsets: [num_requests + 1]
    cache_lengths: [num_rows]; cache_page_table: [num_rows, max_pages]
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.jit import kernel

STEPS = tl.constexpr(8)
"""Entries of a path that are read side by side."""


@triton.jit
def count_kept_nodes(path_ptr, num_accepted_ptr, request, path_width):
    """Returns how many nodes a request keeps: its path up to num_accepted, or up to an earlier -1."""
    last = tl.load(num_accepted_ptr + request)
    kept = path_width
    for first in range(0, path_width, STEPS):
        step = first + tl.arange(0, STEPS)
        node = tl.load(path_ptr + request * path_width + step, mask=step < path_width, other=-1)
        kept = tl.minimum(kept, tl.min(tl.where((node < 0) | (step > last), step, path_width), 0))
    return kept


@triton.jit
def advance_length(rows_ptr, cache_lengths_ptr, request, num_rows, length):
    """Stores the new length of a request in its row of the cache, if the row exists."""
    row = tl.load(rows_ptr + request)
    tl.store(cache_lengths_ptr + row, length, mask=(row >= 0) & (row < num_rows))


@triton.jit
def load_layout(layout_ptr, UNIT: tl.constexpr):
    """Returns the base pointer of a cache, and its units between pages, slots and runs, and per run."""
    page, slot, run, size = (
        tl.load(layout_ptr + 1) // UNIT, tl.load(layout_ptr + 2) // UNIT, tl.load(layout_ptr + 4) // UNIT,
        tl.load(layout_ptr + 5) // UNIT
    )  # fmt: skip
    if UNIT == 4:  # everything is aligned to 16 bytes, which makes loads vectorized
        base = tl.multiple_of(tl.load(layout_ptr).to(tl.pointer_type(tl.int32)), 16)
        page, slot = tl.multiple_of(page, 4), tl.multiple_of(slot, 4)
        run, size = tl.multiple_of(run, 4), tl.multiple_of(size, 4)
    else:
        base = tl.load(layout_ptr).to(tl.pointer_type(tl.uint8))
    return base, page, slot, run, size


@triton.jit
def misaligned_bytes(layout_ptr):
    """Returns 0 if address and strides of a cache are multiples of 16 bytes."""
    spread = tl.where(tl.load(layout_ptr + 3) > 1, tl.load(layout_ptr + 4), 0)
    address_and_strides = tl.load(layout_ptr) | tl.load(layout_ptr + 1) | tl.load(layout_ptr + 2)
    return (address_and_strides | spread | tl.load(layout_ptr + 5)) % 16


@triton.jit
def copy_units(
    source_ptr, target_ptr, table_ptr, path_ptr, block, first, length, kept, max_pages, num_pages, scratch_nodes,
    UNIT: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, SLOTS_AT_ONCE: tl.constexpr,
    FROM_SCRATCH: tl.constexpr,
):  # fmt: skip
    """Copies a block of every kept slot, SLOTS_AT_ONCE slots at a time.

    All slots of a group are read before any is written, and no target is behind a later source, so overlapping slots
    are safe. The length fits in the page table, or nothing is kept.
    """
    unit = block * BLOCK + tl.arange(0, BLOCK)
    base, page_stride, slot_stride, run_stride, run = load_layout(target_ptr, UNIT)
    from_base, from_page, from_slot, from_run_stride, from_run = load_layout(source_ptr, UNIT)
    inside = unit < tl.load(target_ptr + 3) * run
    at = unit // run * run_stride + unit % run
    from_at = at
    if FROM_SCRATCH:
        from_at = unit // from_run * from_run_stride + unit % from_run
    for start in range(0, kept, SLOTS_AT_ONCE):
        step = start + tl.arange(0, SLOTS_AT_ONCE)
        node = tl.load(path_ptr + step, mask=step < kept, other=-1)
        to = length + step
        moves = (node >= 0) & (to < max_pages * PAGE_SIZE)
        to_page = tl.load(table_ptr + to // PAGE_SIZE, mask=moves, other=-1)
        if FROM_SCRATCH:
            moves = moves & (node < scratch_nodes)
            from_place = node.to(tl.int64) * from_slot
        else:
            ahead = node - first
            origin = length + ahead
            moves = moves & (ahead > step) & (ahead < max_pages * PAGE_SIZE - length)
            page = tl.load(table_ptr + origin // PAGE_SIZE, mask=moves, other=-1)
            moves = moves & (page >= 0) & (page < num_pages)
            from_place = page.to(tl.int64) * from_page + (origin % PAGE_SIZE).to(tl.int64) * from_slot
        moves = moves & (to_page >= 0) & (to_page < num_pages)
        place = to_page.to(tl.int64) * page_stride + (to % PAGE_SIZE).to(tl.int64) * slot_stride
        mask = moves[:, None] & inside[None, :]
        moved = tl.load(from_base + from_place[:, None] + from_at[None, :], mask=mask)
        tl.debug_barrier()
        tl.store(base + place[:, None] + at[None, :], moved, mask=mask)
        tl.debug_barrier()


@kernel()
def commit_nodes(
    layout_ptr, scratch_ptr, page_table_ptr, lengths_ptr, path_ptr, offsets_ptr, num_accepted_ptr, rows_ptr,
    cache_lengths_ptr, max_pages, path_width, num_pages, scratch_nodes, num_rows, PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr, SLOTS_AT_ONCE: tl.constexpr, ADVANCE: tl.constexpr, FROM_SCRATCH: tl.constexpr,
):  # fmt: skip
    """Moves the kept nodes of every request inside each cache, or copies them from a scratch of `scratch_nodes` nodes.

    Grid: (num_requests, caches, blocks of BLOCK words of a slot).
    """
    request = tl.program_id(0).to(tl.int64)
    target_ptr, source_ptr = layout_ptr + tl.program_id(1) * 6, scratch_ptr + tl.program_id(1) * 6
    length, first = tl.load(lengths_ptr + request), tl.maximum(tl.load(offsets_ptr + request), 0)
    kept = count_kept_nodes(path_ptr, num_accepted_ptr, request, path_width)
    kept = tl.where((length >= 0) & (length < max_pages * PAGE_SIZE), kept, 0)
    table_ptr, own, block = page_table_ptr + request * max_pages, path_ptr + request * path_width, tl.program_id(2)
    if (misaligned_bytes(target_ptr) | misaligned_bytes(source_ptr)) == 0:
        copy_units(
            source_ptr, target_ptr, table_ptr, own, block, first, length, kept, max_pages, num_pages, scratch_nodes,
            4, PAGE_SIZE, BLOCK, SLOTS_AT_ONCE, FROM_SCRATCH,
        )  # fmt: skip
    else:
        for part in range(4):
            copy_units(
                source_ptr, target_ptr, table_ptr, own, block * 4 + part, first, length, kept, max_pages, num_pages,
                scratch_nodes, 1, PAGE_SIZE, BLOCK, SLOTS_AT_ONCE, FROM_SCRATCH,
            )  # fmt: skip
    if ADVANCE:  # by one program of the request
        alone = (tl.program_id(1) == 0) & (tl.program_id(2) == 0)
        advance_length(rows_ptr, cache_lengths_ptr, request, tl.where(alone, num_rows, 0), length + kept)


@kernel()
def commit_pages(
    page_table_ptr, lengths_ptr, path_ptr, offsets_ptr, num_accepted_ptr, rows_ptr, cache_lengths_ptr,
    cache_page_table_ptr, max_pages, path_width, num_rows, BLOCK: tl.constexpr,
):  # fmt: skip
    """Moves the page ids of kept nodes to the front of the staged ones, and the others behind them.

    Grid: (num_requests,).
    """
    request = tl.program_id(0).to(tl.int64)
    length, begin = tl.load(lengths_ptr + request), tl.maximum(tl.load(offsets_ptr + request), 0)
    end = tl.maximum(tl.load(offsets_ptr + request + 1), begin)
    kept = count_kept_nodes(path_ptr, num_accepted_ptr, request, path_width)
    row = tl.load(rows_ptr + request)
    known = (row >= 0) & (row < num_rows) & (length >= 0) & (length < max_pages)
    staged = tl.where(known, tl.minimum(end - begin, max_pages - length), 0)
    table_ptr, own = page_table_ptr + request * max_pages, cache_page_table_ptr + row.to(tl.int64) * max_pages
    for start in range(0, staged, BLOCK):
        node = start + tl.arange(0, BLOCK)
        before = tl.zeros([BLOCK], tl.int32)
        taken = tl.zeros([BLOCK], tl.int32)
        for step in range(kept):
            one = tl.load(path_ptr + request * path_width + step) - begin
            before += (one < node).to(tl.int32)
            taken += (one == node).to(tl.int32)
        place = length + tl.where(taken > 0, before, kept + node - before)
        inside = (node < staged) & (place < max_pages)
        page = tl.load(table_ptr + length + node, mask=inside, other=0)
        tl.store(own + place, page, mask=inside)
    advance_length(rows_ptr, cache_lengths_ptr, request, num_rows, length + kept)
