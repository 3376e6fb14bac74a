"""Triton kernel of kv_commit: all caches in one launch, through their table of addresses and strides."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["columns", "path_width", "pages"])
def commit(
    layout, page_table, lengths, path, offsets, accepted, rows, cache_lengths, columns, path_width, pages,
    PAGE: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
    ROUND: tl.constexpr, ADVANCE: tl.constexpr,
):  # fmt: skip
    """Grid (requests, caches, blocks of a slot's units). Moves the accepted nodes ROUND at a time, all read before any
    is written: targets never lie behind a later source, so slots that overlap are safe.

    layout: int64 [caches, 6], see `slot_layout`; RUNS pieces of RUN units of UNIT bytes make a slot.
    """
    request = tl.program_id(0)
    cache = layout + tl.program_id(1) * 6
    unit = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    page_stride = tl.load(cache + 1) // UNIT
    slot_stride = tl.load(cache + 2) // UNIT
    run_stride = tl.load(cache + 4) // UNIT
    if UNIT == 4:  # everything is aligned to 16 bytes: say so, for wide loads
        base = tl.multiple_of(tl.load(cache).to(tl.pointer_type(tl.int32)), 16)
        page_stride = tl.multiple_of(page_stride, 4)
        slot_stride = tl.multiple_of(slot_stride, 4)
        run_stride = tl.multiple_of(run_stride, 4)
    else:
        base = tl.load(cache).to(tl.pointer_type(tl.uint8))
    at = (unit // RUN) * run_stride + unit % RUN

    length = tl.load(lengths + request)
    first = tl.load(offsets + request)
    count = tl.minimum(tl.load(accepted + request) + 1, path_width)
    begins = tl.load(path + request * path_width)
    count = tl.where(begins >= 0, count, 0)
    table = page_table + request.to(tl.int64) * columns
    for start in range(0, count, ROUND):
        step = start + tl.arange(0, ROUND)
        node = tl.load(path + request * path_width + step, mask=step < count, other=-1)
        source = length + node - first
        target = length + step
        moves = (node >= 0) & (source > target) & (source < columns * PAGE)
        source_page = tl.load(table + source // PAGE, mask=moves, other=0)
        target_page = tl.load(table + target // PAGE, mask=moves, other=0)
        least = tl.minimum(source_page, target_page)
        moves = moves & (least >= 0) & (tl.maximum(source_page, target_page) < pages)
        source_at = source_page.to(tl.int64) * page_stride + (source % PAGE).to(tl.int64) * slot_stride
        target_at = target_page.to(tl.int64) * page_stride + (target % PAGE).to(tl.int64) * slot_stride
        mask = moves[:, None] & (unit < RUNS * RUN)[None, :]
        moved = tl.load(base + source_at[:, None] + at[None, :], mask=mask)
        tl.debug_barrier()
        tl.store(base + target_at[:, None] + at[None, :], moved, mask=mask)
        tl.debug_barrier()
    if ADVANCE:
        alone = (tl.program_id(1) == 0) & (tl.program_id(2) == 0)
        tl.store(cache_lengths + tl.load(rows + request), length + count, mask=alone)
