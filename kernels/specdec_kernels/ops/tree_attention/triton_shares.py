"""Triton kernels of tree attention on a fixed grid: every program takes an equal share of all tiles of a pass.

Tiles are numbered through: blocks of query rows in order, within a block the key/value heads, within those the tiles of
keys that the block may see. A block and a key/value head are an item. Program c takes tiles c * share and following;
the first and the last item of a share may have parts elsewhere too. Which program found a part, and where it lies,
follows from the numbers alone: slot 2 c holds the first part of program c, slot 2 c + 1 the last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.jit import kernel
from . import plan
from .triton_kernel import WIDE, attend_tiles, nodes_of, tile_range, write_answer, write_part

LEAST = tl.constexpr(plan.MIN_SHARE_TILES)


@triton.jit
def share_of(total, KV_HEADS: tl.constexpr, PROGRAMS: tl.constexpr):
    return tl.maximum(tl.cdiv(total * KV_HEADS, PROGRAMS), LEAST)


@triton.jit
def last_not_above(numbers, wanted, high, steps, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Index of the last of numbers[0 .. high] that is at most `wanted`, by bisection. GROUP > 0: numbers are offsets,
    and the first block of their request is compared."""
    low = tl.zeros_like(wanted)
    high = low + high
    for _ in range(steps):
        middle = (low + high + 1) // 2
        number = tl.load(numbers + middle)
        if GROUP > 0:
            number = number * GROUP // BLOCK_M + middle
        below = number <= wanted
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle - 1)
    return low


@kernel()
def plan_shares(
    lengths, offsets, starts, rows, firsts, window, batch, nodes, blocks, most, steps,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, PROGRAMS: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: tiles before every block, its request, and the block with which every program begins. A block
    has at most `most` tiles, so that all of them can be numbered."""
    total = tl.zeros((), tl.int32)
    for chunk in range(0, blocks, BLOCK):
        block = chunk + tl.arange(0, BLOCK)
        row = last_not_above(offsets, block, batch, steps, GROUP, BLOCK_M)
        first, count = nodes_of(offsets, row, batch, nodes)
        own = block - (first * GROUP // BLOCK_M + row)
        length = tl.load(lengths + row, mask=row < batch, other=0)
        begin, tiles = tile_range(length, count, own, row, batch, most, window, GROUP, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
        size = tl.where(
            (block < blocks) & (own >= 0) & (own * BLOCK_M < count * GROUP), tl.maximum(tiles - begin, 0), 0
        )
        tl.store(starts + block, total + tl.cumsum(size, 0) - size, mask=block < blocks)
        tl.store(rows + block, row, mask=block < blocks)
        total += tl.sum(size, 0)
    tl.store(starts + blocks, total)
    tl.debug_barrier()
    program = tl.arange(0, PLACES)
    begins = program * share_of(total, KV_HEADS, PROGRAMS) // KV_HEADS
    tl.store(firsts + program, last_not_above(starts, begins, blocks - 1, steps, 0, 1), mask=program < PROGRAMS)


@triton.jit
def place_of(offsets, rows, block, batch, nodes, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Request of a block, the request's first node and number of nodes, and the block's number within it."""
    row = tl.load(rows + block)
    first, count = nodes_of(offsets, row, batch, nodes)
    return row, first, count, block - (first * GROUP // BLOCK_M + row)


@kernel(*WIDE)
def attend_shares(
    query, key_cache, value_cache, table, lengths, offsets, ancestors, depth, sinks, out, lse, part, part_lse,
    key_scale, value_scale, starts, row_of, firsts, scale, softcap, window, batch, nodes, blocks, pages, pages_per_row,
    table_row, words_per_node, q_node, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, o_node, o_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PROGRAMS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, SCALED: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    """Grid (PROGRAMS). What a share holds whole goes to `out`, other parts to `part` (float32 [2 PROGRAMS, BLOCK_M,
    WIDTH]) and `part_lse` (float32 [2 PROGRAMS, BLOCK_M])."""
    program = tl.program_id(0)
    total = tl.load(starts + blocks)
    share = share_of(total, HEADS // GROUP, PROGRAMS)
    tile = program * share
    end = tl.minimum(tile + share, total * (HEADS // GROUP))
    at = tl.load(firsts + program)
    while tile < end:
        start, stop = tl.load(starts + at), tl.load(starts + at + 1)
        if stop > start:
            size = stop - start
            kv_head = (tile - start * (HEADS // GROUP)) // size
            begin_of_item = start * (HEADS // GROUP) + kv_head * size
            lo = tile - begin_of_item
            hi = tl.minimum(size, lo + end - tile)
            row, first, count, block = place_of(offsets, row_of, at, batch, nodes, GROUP, BLOCK_M)
            length, room = tl.load(lengths + row), tl.cdiv(pages_per_row * PAGE, BLOCK_N)
            begin, last = tile_range(
                length, count, block, row, batch, room, window, GROUP, BLOCK_M, BLOCK_N, CAUSAL, WINDOW
            )
            acc, top, weights = attend_tiles(
                query, key_cache, value_cache, table, ancestors, depth, key_scale, value_scale, scale, softcap, window,
                pages, pages_per_row, table_row, words_per_node, q_node, q_head, k_page, k_slot, k_head, v_page, v_slot,
                v_head, row, first, count, block, length, kv_head, begin + lo, tl.minimum(begin + hi, last),
                GROUP, PAGE, WIDTH, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, SOFTCAP, SCALED, ALIKE,
            )  # fmt: skip
            lane = tl.arange(0, BLOCK_M)
            index = block * BLOCK_M + lane
            inside = index < count * GROUP
            if hi - lo == size:
                rows = (first + tl.where(inside, index // GROUP, 0)).to(tl.int64)
                head = kv_head * GROUP + index % GROUP
                write_answer(
                    acc, top, weights, rows, head, inside, row < batch, sinks, out, lse, o_node, o_head,
                    HEADS, WIDTH, BLOCK_D, SINKS, LSE,
                )  # fmt: skip
            else:
                slot = 2 * program + (program * share < begin_of_item).to(tl.int32)
                write_part(acc, top, weights, slot * BLOCK_M + lane, inside, part, part_lse, WIDTH, BLOCK_D)
            tile += hi - lo
        at += (tile >= stop * (HEADS // GROUP)).to(tl.int32)


@kernel("part", "out", "o_node", "o_head")
def join_shares(
    part, part_lse, starts, row_of, offsets, sinks, out, lse, batch, nodes, blocks, o_node, o_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, PROGRAMS: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Joins the parts of BLOCK_R rows of an item that several shares hold, BLOCK_P at a time, and answers for rows that
    no share holds. Grid (blocks, key/value heads, BLOCK_M // BLOCK_R)."""
    at, kv_head = tl.program_id(0), tl.program_id(1)
    row, first, count, block = place_of(offsets, row_of, at, batch, nodes, GROUP, BLOCK_M)
    lane = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    index = block * BLOCK_M + lane
    inside = index < count * GROUP
    start = tl.load(starts + at)
    size = tl.load(starts + at + 1) - start
    share = share_of(tl.load(starts + blocks), HEADS // GROUP, PROGRAMS)
    begin = start * (HEADS // GROUP) + kv_head * size
    lowest = begin // share
    parts = tl.where(size > 0, (begin + size - 1) // share - lowest + 1, 0)
    if (parts != 1) & (block >= 0) & (block * BLOCK_M + tl.program_id(2) * BLOCK_R < count * GROUP):
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
            measure = tl.load(part_lse + cell, mask=have, other=float("-inf"))
            seen = (measure != float("-inf"))[:, :, None] & (wide < WIDTH)[None, None, :]
            mean = tl.load(part + cell[:, :, None] * WIDTH + wide[None, None, :], mask=seen, other=0.0)
            highest = tl.maximum(top, tl.max(measure, axis=0))
            base = tl.where(highest == float("-inf"), 0.0, highest)
            old = tl.exp2(top - base)
            new = tl.exp2(measure - base[None, :])
            weights = weights * old + tl.sum(new, axis=0)
            acc = acc * old[:, None] + tl.sum(mean * new[:, :, None], axis=0)
            top = highest
        rows = (first + tl.where(inside, index // GROUP, 0)).to(tl.int64)
        head = kv_head * GROUP + index % GROUP
        write_answer(
            acc, top, weights, rows, head, inside, row < batch, sinks, out, lse, o_node, o_head,
            HEADS, WIDTH, BLOCK_D, SINKS, LSE,
        )  # fmt: skip
