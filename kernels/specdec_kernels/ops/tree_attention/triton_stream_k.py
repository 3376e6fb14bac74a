"""Triton kernels of tree attention on a fixed grid: every program takes an equal share of all tiles of a pass.

Tiles are numbered over blocks of query rows in order, within a block over key/value heads, and within those over the
tiles of keys that the block may see. A block and a key/value head are an item. Program c takes tiles c * share and
following. The first and the last item of a share may have parts in other shares too. The slot of a part follows from
its number alone: slot 2 c holds the first part of program c, slot 2 c + 1 the last.

Shapes are those of `triton_kernel.py`, and (int32 unless said otherwise):
    starts: [num_blocks + 1]; block_rows: [num_blocks]; first_blocks: [NUM_PROGRAMS], see `AttentionPlan`
    partial: float32 [2 * NUM_PROGRAMS, BLOCK_M, HEAD_DIM]; partial_lse: float32 [2 * NUM_PROGRAMS, BLOCK_M]
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.jit import kernel
from . import plan
from .triton_kernel import VECTORIZED
from .triton_tiles import (
    Block,
    Inputs,
    Options,
    Strides,
    attend_tiles,
    load_node_range,
    visible_tiles,
    write_output,
    write_partial,
)

MIN_SHARE_TILES = tl.constexpr(plan.MIN_SHARE_TILES)


@triton.jit
def tiles_per_share(total, NUM_KV_HEADS: tl.constexpr, NUM_PROGRAMS: tl.constexpr):
    """Returns the tiles of a share."""
    return tl.maximum(tl.cdiv(total * NUM_KV_HEADS, NUM_PROGRAMS), MIN_SHARE_TILES)


@triton.jit
def bisect_last_at_most(numbers, wanted, high, steps, GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns the index of the last of numbers[0 .. high] that is at most `wanted`, by bisection.

    With GROUP_SIZE > 0 the numbers are offsets, and the first block of their request is compared.
    """
    low = tl.zeros_like(wanted)
    high = low + high
    for _ in range(steps):
        middle = (low + high + 1) // 2
        number = tl.load(numbers + middle)
        if GROUP_SIZE > 0:
            number = number * GROUP_SIZE // BLOCK_M + middle
        below = number <= wanted
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle - 1)
    return low


@kernel()
def plan_shares(
    lengths_ptr, offsets_ptr, starts_ptr, block_rows_ptr, first_blocks_ptr, window, num_requests, num_nodes, num_blocks,
    max_tiles, steps, NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    PROGRAM_LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the tiles before every block, its request, and the block in which every share begins. Grid: (1,).

    A block has at most `max_tiles` tiles, so that all of them can be numbered.
    """
    total = tl.zeros((), tl.int32)
    for chunk in range(0, num_blocks, BLOCK):
        block = chunk + tl.arange(0, BLOCK)
        row = bisect_last_at_most(offsets_ptr, block, num_requests, steps, GROUP_SIZE, BLOCK_M)
        first, count = load_node_range(offsets_ptr, row, num_requests, num_nodes)
        own = block - (first * GROUP_SIZE // BLOCK_M + row)
        length = tl.load(lengths_ptr + row, mask=row < num_requests, other=0)
        begin, tiles = visible_tiles(
            length,
            count,
            own,
            row,
            num_requests,
            max_tiles,
            window,
            GROUP_SIZE,
            BLOCK_M,
            BLOCK_N,
            IS_CAUSAL,
            HAS_WINDOW,
        )
        size = tl.where(
            (block < num_blocks) & (own >= 0) & (own * BLOCK_M < count * GROUP_SIZE), tl.maximum(tiles - begin, 0), 0
        )
        tl.store(starts_ptr + block, total + tl.cumsum(size, 0) - size, mask=block < num_blocks)
        tl.store(block_rows_ptr + block, row, mask=block < num_blocks)
        total += tl.sum(size, 0)
    tl.store(starts_ptr + num_blocks, total)
    tl.debug_barrier()
    program = tl.arange(0, PROGRAM_LANES)
    begins = program * tiles_per_share(total, NUM_KV_HEADS, NUM_PROGRAMS) // NUM_KV_HEADS
    tl.store(
        first_blocks_ptr + program,
        bisect_last_at_most(starts_ptr, begins, num_blocks - 1, steps, 0, 1),
        mask=program < NUM_PROGRAMS,
    )


@triton.jit
def load_block(
    offsets_ptr, block_rows_ptr, block, num_requests, num_nodes, GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Returns the request of a block, its first node, its number of nodes, and the block's number there."""
    row = tl.load(block_rows_ptr + block)
    first, count = load_node_range(offsets_ptr, row, num_requests, num_nodes)
    return row, first, count, block - (first * GROUP_SIZE // BLOCK_M + row)


@kernel(*VECTORIZED)
def attend_shares(
    query_ptr, key_cache_ptr, value_cache_ptr, page_table_ptr, lengths_ptr, offsets_ptr, ancestors_ptr, depth_ptr,
    sinks_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, key_scale_ptr, value_scale_ptr, starts_ptr,
    block_rows_ptr, first_blocks_ptr, scale, softcap, window, num_requests, num_nodes, num_blocks, num_pages, max_pages,
    page_table_row_stride, num_words, query_node_stride, query_head_stride, key_page_stride, key_slot_stride,
    key_head_stride, value_page_stride, value_slot_stride, value_head_stride, out_node_stride, out_head_stride,
    NUM_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr, HAS_SCALES: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    """Attends from every block to the tiles of one share. Grid: (NUM_PROGRAMS,).

    Items that a share holds whole are written to `out`, parts of items to `partial` and `partial_lse`.
    """
    program = tl.program_id(0)
    total = tl.load(starts_ptr + num_blocks)
    share = tiles_per_share(total, NUM_HEADS // GROUP_SIZE, NUM_PROGRAMS)
    tile = program * share
    end = tl.minimum(tile + share, total * (NUM_HEADS // GROUP_SIZE))
    at = tl.load(first_blocks_ptr + program)
    while tile < end:
        start, stop = tl.load(starts_ptr + at), tl.load(starts_ptr + at + 1)
        if stop > start:
            size = stop - start
            kv_head = (tile - start * (NUM_HEADS // GROUP_SIZE)) // size
            begin_of_item = start * (NUM_HEADS // GROUP_SIZE) + kv_head * size
            lo = tile - begin_of_item
            hi = tl.minimum(size, lo + end - tile)
            row, first, count, block = load_block(
                offsets_ptr, block_rows_ptr, at, num_requests, num_nodes, GROUP_SIZE, BLOCK_M
            )
            length, room = tl.load(lengths_ptr + row), tl.cdiv(max_pages * PAGE_SIZE, BLOCK_N)
            begin, last = visible_tiles(
                length,
                count,
                block,
                row,
                num_requests,
                room,
                window,
                GROUP_SIZE,
                BLOCK_M,
                BLOCK_N,
                IS_CAUSAL,
                HAS_WINDOW,
            )
            acc, top, weights = attend_tiles(
                Inputs(
                    query_ptr, key_cache_ptr, value_cache_ptr, page_table_ptr, ancestors_ptr, depth_ptr, key_scale_ptr,
                    value_scale_ptr, scale, softcap, window, num_pages, max_pages, num_words,
                ),
                Strides(
                    page_table_row_stride, query_node_stride, query_head_stride, key_page_stride, key_slot_stride,
                    key_head_stride, value_page_stride, value_slot_stride, value_head_stride,
                ),
                Options(
                    GROUP_SIZE, PAGE_SIZE, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, IS_CAUSAL, HAS_WINDOW, HAS_SOFTCAP,
                    HAS_SCALES, SAME_STRIDES,
                ),
                Block(row, first, count, block), length, kv_head, begin + lo, tl.minimum(begin + hi, last),
            )  # fmt: skip
            lane = tl.arange(0, BLOCK_M)
            index = block * BLOCK_M + lane
            inside = index < count * GROUP_SIZE
            if hi - lo == size:
                rows = (first + tl.where(inside, index // GROUP_SIZE, 0)).to(tl.int64)
                head = kv_head * GROUP_SIZE + index % GROUP_SIZE
                write_output(
                    acc, top, weights, rows, head, inside, row < num_requests, sinks_ptr, out_ptr, lse_ptr,
                    out_node_stride, out_head_stride, NUM_HEADS, HEAD_DIM, BLOCK_D, HAS_SINKS, HAS_LSE,
                )  # fmt: skip
            else:
                slot = 2 * program + (program * share < begin_of_item).to(tl.int32)
                write_partial(
                    acc, top, weights, slot * BLOCK_M + lane, inside, partial_ptr, partial_lse_ptr, HEAD_DIM, BLOCK_D
                )
            tile += hi - lo
        at += (tile >= stop * (NUM_HEADS // GROUP_SIZE)).to(tl.int32)


@kernel("partial_ptr", "out_ptr", "out_node_stride", "out_head_stride")
def combine_shares(
    partial_ptr, partial_lse_ptr, starts_ptr, block_rows_ptr, offsets_ptr, sinks_ptr, out_ptr, lse_ptr, num_requests,
    num_nodes, num_blocks, out_node_stride, out_head_stride, NUM_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Combines the parts of BLOCK_R rows of an item that several shares hold, BLOCK_P at a time.

    Rows that no share holds get zeros. Grid: (num_blocks, key/value heads, BLOCK_M // BLOCK_R).
    """
    at, kv_head = tl.program_id(0), tl.program_id(1)
    row, first, count, block = load_block(offsets_ptr, block_rows_ptr, at, num_requests, num_nodes, GROUP_SIZE, BLOCK_M)
    lane = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    index = block * BLOCK_M + lane
    inside = index < count * GROUP_SIZE
    start = tl.load(starts_ptr + at)
    size = tl.load(starts_ptr + at + 1) - start
    share = tiles_per_share(tl.load(starts_ptr + num_blocks), NUM_HEADS // GROUP_SIZE, NUM_PROGRAMS)
    begin = start * (NUM_HEADS // GROUP_SIZE) + kv_head * size
    lowest = begin // share
    parts = tl.where(size > 0, (begin + size - 1) // share - lowest + 1, 0)
    if (parts != 1) & (block >= 0) & (block * BLOCK_M + tl.program_id(2) * BLOCK_R < count * GROUP_SIZE):
        wide = tl.arange(0, BLOCK_D)
        top = tl.full([BLOCK_R], float("-inf"), tl.float32)
        weights = tl.zeros([BLOCK_R], tl.float32)
        acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        for chunk in range(0, parts, BLOCK_P):
            one = chunk + tl.arange(0, BLOCK_P)
            program = lowest + one
            slot = 2 * program + (program * share < begin).to(tl.int32)
            cell = (slot * BLOCK_M)[:, None] + lane[None, :]
            have = (one < parts)[:, None] & inside[None, :]
            measure = tl.load(partial_lse_ptr + cell, mask=have, other=float("-inf"))
            seen = (measure != float("-inf"))[:, :, None] & (wide < HEAD_DIM)[None, None, :]
            mean = tl.load(partial_ptr + cell[:, :, None] * HEAD_DIM + wide[None, None, :], mask=seen, other=0.0)
            highest = tl.maximum(top, tl.max(measure, axis=0))
            base = tl.where(highest == float("-inf"), 0.0, highest)
            old = tl.exp2(top - base)
            new = tl.exp2(measure - base[None, :])
            weights = weights * old + tl.sum(new, axis=0)
            acc = acc * old[:, None] + tl.sum(mean * new[:, :, None], axis=0)
            top = highest
        rows = (first + tl.where(inside, index // GROUP_SIZE, 0)).to(tl.int64)
        head = kv_head * GROUP_SIZE + index % GROUP_SIZE
        write_output(
            acc, top, weights, rows, head, inside, row < num_requests, sinks_ptr, out_ptr, lse_ptr, out_node_stride,
            out_head_stride, NUM_HEADS, HEAD_DIM, BLOCK_D, HAS_SINKS, HAS_LSE,
        )  # fmt: skip
