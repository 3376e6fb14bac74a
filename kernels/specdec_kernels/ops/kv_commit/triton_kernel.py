"""Triton kernels of the commits: all caches in one launch, through their tables of addresses and strides."""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.jit import kernel

STEPS = tl.constexpr(8)
"""Places of a path that are looked at side by side."""


@triton.jit
def kept_nodes(path, accepted, request, path_width):
    """Tokens that a request keeps: its path up to num_accepted, or to where it ends before."""
    last = tl.load(accepted + request)
    kept = path_width
    for first in range(0, path_width, STEPS):
        step = first + tl.arange(0, STEPS)
        node = tl.load(path + request * path_width + step, mask=step < path_width, other=-1)
        kept = tl.minimum(kept, tl.min(tl.where((node < 0) | (step > last), step, path_width), 0))
    return kept


@triton.jit
def advance(rows, cache_lengths, request, capacity, length):
    row = tl.load(rows + request)
    tl.store(cache_lengths + row, length, mask=(row >= 0) & (row < capacity))


@triton.jit
def base_of(cache, UNIT: tl.constexpr):
    """Pointer to the units of a cache, and units between pages, slots and runs, and of a run."""
    page, slot, run, size = (
        tl.load(cache + 1) // UNIT, tl.load(cache + 2) // UNIT, tl.load(cache + 4) // UNIT, tl.load(cache + 5) // UNIT
    )  # fmt: skip
    if UNIT == 4:  # everything is aligned to 16 bytes: say so, for wide loads
        base = tl.multiple_of(tl.load(cache).to(tl.pointer_type(tl.int32)), 16)
        page, slot = tl.multiple_of(page, 4), tl.multiple_of(slot, 4)
        run, size = tl.multiple_of(run, 4), tl.multiple_of(size, 4)
    else:
        base = tl.load(cache).to(tl.pointer_type(tl.uint8))
    return base, page, slot, run, size


@triton.jit
def odd_bytes(cache):
    """Not 0 where an address or a size of a cache is no multiple of 16 bytes."""
    spread = tl.where(tl.load(cache + 3) > 1, tl.load(cache + 4), 0)
    return (tl.load(cache) | tl.load(cache + 1) | tl.load(cache + 2) | spread | tl.load(cache + 5)) % 16


@triton.jit
def copy_units(
    source, target, table, path, block, first, length, kept, columns, pages, held,
    UNIT: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr, SCRATCH: tl.constexpr,
):  # fmt: skip
    """Copies a block of every kept slot, ROUND slots at a time, all read before any is written: targets never lie
    behind a later source, so slots that overlap are safe. The length lies within the row, or nothing is kept."""
    unit = block * BLOCK + tl.arange(0, BLOCK)
    base, page_stride, slot_stride, run_stride, run = base_of(target, UNIT)
    from_base, from_page, from_slot, from_run_stride, from_run = base_of(source, UNIT)
    inside = unit < tl.load(target + 3) * run
    at = unit // run * run_stride + unit % run
    from_at = at
    if SCRATCH:
        from_at = unit // from_run * from_run_stride + unit % from_run
    for start in range(0, kept, ROUND):
        step = start + tl.arange(0, ROUND)
        node = tl.load(path + step, mask=step < kept, other=-1)
        to = length + step
        moves = (node >= 0) & (to < columns * PAGE)
        to_page = tl.load(table + to // PAGE, mask=moves, other=-1)
        if SCRATCH:
            moves = moves & (node < held)
            from_place = node.to(tl.int64) * from_slot
        else:
            ahead = node - first
            origin = length + ahead
            moves = moves & (ahead > step) & (ahead < columns * PAGE - length)
            page = tl.load(table + origin // PAGE, mask=moves, other=-1)
            moves = moves & (page >= 0) & (page < pages)
            from_place = page.to(tl.int64) * from_page + (origin % PAGE).to(tl.int64) * from_slot
        moves = moves & (to_page >= 0) & (to_page < pages)
        place = to_page.to(tl.int64) * page_stride + (to % PAGE).to(tl.int64) * slot_stride
        mask = moves[:, None] & inside[None, :]
        moved = tl.load(from_base + from_place[:, None] + from_at[None, :], mask=mask)
        tl.debug_barrier()
        tl.store(base + place[:, None] + at[None, :], moved, mask=mask)
        tl.debug_barrier()


@kernel()
def commit(
    layout, scratch, page_table, lengths, path, offsets, accepted, rows, cache_lengths, columns, path_width, pages,
    held, capacity, PAGE: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr,
    ADVANCE: tl.constexpr, SCRATCH: tl.constexpr,
):  # fmt: skip
    """Grid (requests, caches, blocks of BLOCK words of a slot). layout, scratch: int64 [caches, 6], see `slot_layout`;
    the nodes are copied out of a scratch of `held` slots, or inside the cache."""
    request = tl.program_id(0).to(tl.int64)
    target, source = layout + tl.program_id(1) * 6, scratch + tl.program_id(1) * 6
    length, first = tl.load(lengths + request), tl.maximum(tl.load(offsets + request), 0)
    kept = kept_nodes(path, accepted, request, path_width)
    kept = tl.where((length >= 0) & (length < columns * PAGE), kept, 0)
    table, own, block = page_table + request * columns, path + request * path_width, tl.program_id(2)
    if (odd_bytes(target) | odd_bytes(source)) == 0:
        copy_units(
            source, target, table, own, block, first, length, kept, columns, pages, held, 4, PAGE, BLOCK, ROUND, SCRATCH
        )
    else:
        for part in range(4):
            copy_units(
                source, target, table, own, block * 4 + part, first, length, kept, columns, pages, held, 1, PAGE, BLOCK,
                ROUND, SCRATCH,
            )  # fmt: skip
    if ADVANCE:  # by one of the request's programs
        alone = (tl.program_id(1) == 0) & (tl.program_id(2) == 0)
        advance(rows, cache_lengths, request, tl.where(alone, capacity, 0), length + kept)


@kernel()
def commit_pages(
    page_table, lengths, path, offsets, accepted, rows, cache_lengths, cache_table, columns, path_width, capacity,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (requests). Page ids of the kept nodes go to the front of those that were staged, the others behind them."""
    request = tl.program_id(0).to(tl.int64)
    length, begin = tl.load(lengths + request), tl.maximum(tl.load(offsets + request), 0)
    end = tl.maximum(tl.load(offsets + request + 1), begin)
    kept = kept_nodes(path, accepted, request, path_width)
    row = tl.load(rows + request)
    known = (row >= 0) & (row < capacity) & (length >= 0) & (length < columns)
    held = tl.where(known, tl.minimum(end - begin, columns - length), 0)
    table, own = page_table + request * columns, cache_table + row.to(tl.int64) * columns
    for start in range(0, held, BLOCK):
        node = start + tl.arange(0, BLOCK)
        before = tl.zeros([BLOCK], tl.int32)
        taken = tl.zeros([BLOCK], tl.int32)
        for step in range(kept):
            one = tl.load(path + request * path_width + step) - begin
            before += (one < node).to(tl.int32)
            taken += (one == node).to(tl.int32)
        place = length + tl.where(taken > 0, before, kept + node - before)
        inside = (node < held) & (place < columns)
        page = tl.load(table + length + node, mask=inside, other=0)
        tl.store(own + place, page, mask=inside)
    advance(rows, cache_lengths, request, capacity, length + kept)
