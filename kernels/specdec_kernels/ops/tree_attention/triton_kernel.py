"""Triton kernels of tree_attention: `attend_pieces` over pieces of the keys, `combine_pieces` to combine them.

One program of `attend_pieces` owns BLOCK_M query rows of one request and one key/value head, and one piece of the
request's keys. A query row is a node and one of the GROUP_SIZE heads that share the key/value head. Tiles of BLOCK_N
keys begin at multiples of BLOCK_N of the absolute slot. Tiles inside the committed prefix need no mask. The last tile
of the prefix and those of the tree share a second loop, where a key is visible if it is committed or an ancestor.
Scores are in units of log2, so that weights are powers of two.

Shapes (int32 unless said otherwise):
    query, out: float [num_nodes, NUM_HEADS, HEAD_DIM]; lse: float32 [num_nodes, NUM_HEADS]
    key_cache, value_cache: float [num_pages, PAGE_SIZE, NUM_HEADS // GROUP_SIZE, HEAD_DIM]
    page_table: [num_requests, max_pages]; lengths: [num_requests]; offsets: [num_requests + 1]
    ancestors: [num_nodes, num_words]; depth: [num_nodes]; sinks: float [NUM_HEADS]
    key_scale, value_scale: float32 [NUM_HEADS // GROUP_SIZE]
    partial: float32 [NUM_PIECES, num_nodes, NUM_HEADS, HEAD_DIM], weighted means of a piece
    partial_lse: float32 [NUM_PIECES, num_nodes, NUM_HEADS], log2 of the sum of a piece's weights

`row` is a request, `block` a block of BLOCK_M query rows of one request, `tile` a tile of BLOCK_N keys. Nodes from
offsets[num_requests] on belong to no request: their row is `num_requests`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.jit import kernel
from .triton_tiles import (
    LN_2,
    LOG2_E,
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

VECTORIZED = (
    "query_ptr", "key_cache_ptr", "value_cache_ptr", "out_ptr", "partial_ptr", "query_node_stride", "query_head_stride",
    "key_page_stride", "key_slot_stride", "key_head_stride", "value_page_stride", "value_slot_stride",
    "value_head_stride", "out_node_stride", "out_head_stride",
)  # fmt: skip
"""Arguments that are specialised, so that loads and stores of heads are vectorized; see `triton_shared.jit.kernel`."""


@triton.jit
def locate_block(
    offsets_ptr, block, num_requests, num_nodes, GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr
):
    """Finds the request of a block.

    Request b takes the blocks from offsets[b] * GROUP_SIZE // BLOCK_M + b on. They always suffice and need no plan.

    Returns:
        The request, its first node, its number of nodes, and the index of the block within the request.
    """
    row = tl.arange(0, BLOCK_B)
    first = tl.load(offsets_ptr + row, mask=(row > 0) & (row <= num_requests), other=0)
    start = tl.minimum(tl.maximum(first, 0), num_nodes) * GROUP_SIZE // BLOCK_M + row
    found = tl.sum(((row <= num_requests) & (start <= block)).to(tl.int32), axis=0) - 1
    begin, count = load_node_range(offsets_ptr, found, num_requests, num_nodes)
    return found, begin, count, block - (begin * GROUP_SIZE // BLOCK_M + found)


@kernel(*VECTORIZED)
def attend_pieces(
    query_ptr, key_cache_ptr, value_cache_ptr, page_table_ptr, lengths_ptr, offsets_ptr, ancestors_ptr, depth_ptr,
    sinks_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, key_scale_ptr, value_scale_ptr, scale, softcap, window,
    num_requests, num_nodes, num_pages, max_pages, page_table_row_stride, num_words, query_node_stride,
    query_head_stride, key_page_stride, key_slot_stride, key_head_stride, value_page_stride, value_slot_stride,
    value_head_stride, out_node_stride, out_head_stride, NUM_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, NUM_PIECES: tl.constexpr, TILES_PER_PIECE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr, HAS_SCALES: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    """Attends from a block of query rows to one piece of the keys of their request.

    Grid: (blocks, key/value heads, NUM_PIECES). TILES_PER_PIECE: tiles of a piece, which begin at fixed slots; 0 means
    an equal share. One piece writes `out`, several write `partial` and `partial_lse`.
    """
    kv_head = tl.program_id(1)
    piece = tl.program_id(2)
    row, first, count, block = locate_block(
        offsets_ptr, tl.program_id(0), num_requests, num_nodes, GROUP_SIZE, BLOCK_M, BLOCK_B
    )
    if (block < 0) | (block * BLOCK_M >= count * GROUP_SIZE):
        return
    length, room = tl.load(lengths_ptr + row, mask=row < num_requests, other=0), tl.cdiv(max_pages * PAGE_SIZE, BLOCK_N)
    begin, tiles = visible_tiles(
        length, count, block, row, num_requests, room, window, GROUP_SIZE, BLOCK_M, BLOCK_N, IS_CAUSAL, HAS_WINDOW
    )
    if TILES_PER_PIECE:
        lo = tl.maximum(begin, piece * TILES_PER_PIECE)
        hi = tl.minimum(tiles, (piece + 1) * TILES_PER_PIECE)
    else:
        share = tl.cdiv(tl.maximum(tiles - begin, 0), NUM_PIECES)
        lo = begin + piece * share
        hi = tl.minimum(tiles, lo + share)
    acc, top, total = attend_tiles(
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
        Block(row, first, count, block), length, kv_head, lo, hi,
    )  # fmt: skip
    index = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = index < count * GROUP_SIZE
    rows = (first + tl.where(inside, index // GROUP_SIZE, 0)).to(tl.int64)
    head = kv_head * GROUP_SIZE + index % GROUP_SIZE
    if NUM_PIECES == 1:
        write_output(
            acc, top, total, rows, head, inside, row < num_requests, sinks_ptr, out_ptr, lse_ptr, out_node_stride,
            out_head_stride, NUM_HEADS, HEAD_DIM, BLOCK_D, HAS_SINKS, HAS_LSE,
        )  # fmt: skip
    else:
        at = (piece.to(tl.int64) * num_nodes + rows) * NUM_HEADS + head
        write_partial(acc, top, total, at, inside, partial_ptr, partial_lse_ptr, HEAD_DIM, BLOCK_D)


@kernel("partial_ptr", "out_ptr", "out_node_stride", "out_head_stride")
def combine_pieces(
    partial_ptr, partial_lse_ptr, sinks_ptr, offsets_ptr, out_ptr, lse_ptr, num_requests, num_nodes, out_node_stride,
    out_head_stride, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr, NUM_PIECES: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Combines the pieces of one node and BLOCK_H heads, BLOCK_P at a time. Grid: (num_nodes, blocks of heads)."""
    node = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    wide = tl.arange(0, BLOCK_D)
    inside = head < NUM_HEADS
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    if HAS_SINKS:  # part of the softmax of every node that belongs to a request
        mine = head < tl.where(node < tl.load(offsets_ptr + num_requests), NUM_HEADS, 0)
        top = tl.load(sinks_ptr + head, mask=inside, other=0.0).to(tl.float32) * LOG2_E
        top = tl.where(mine, top, float("-inf"))
        total = tl.where(mine, 1.0, 0.0)
    for start in range(0, NUM_PIECES, BLOCK_P):
        piece = start + tl.arange(0, BLOCK_P)
        at = (piece.to(tl.int64)[:, None] * num_nodes + node) * NUM_HEADS + head[None, :]
        size = tl.load(partial_lse_ptr + at, mask=(piece < NUM_PIECES)[:, None] & inside[None, :], other=float("-inf"))
        seen = (size != float("-inf"))[:, :, None] & (wide < HEAD_DIM)[None, None, :]
        mean = tl.load(partial_ptr + at[:, :, None] * HEAD_DIM + wide[None, None, :], mask=seen, other=0.0)
        highest = tl.maximum(top, tl.max(size, axis=0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        old = tl.exp2(top - base)
        new = tl.exp2(size - base[None, :])
        total = total * old + tl.sum(new, axis=0)
        acc = acc * old[:, None] + tl.sum(mean * new[:, :, None], axis=0)
        top = highest
    mean = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    store = inside[:, None] & (wide < HEAD_DIM)[None, :]
    at = node * out_node_stride + head * out_head_stride
    tl.store(out_ptr + at[:, None] + wide[None, :], mean.to(out_ptr.dtype.element_ty), mask=store)
    if HAS_LSE:
        value = tl.where(total == 0.0, float("-inf"), (top + tl.log2(tl.where(total == 0.0, 1.0, total))) * LN_2)
        tl.store(lse_ptr + node * NUM_HEADS + head, value, mask=inside)
