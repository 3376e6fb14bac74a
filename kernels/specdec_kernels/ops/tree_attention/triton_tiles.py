"""Parts of the Triton kernels of tree_attention: tiles of keys, masks, the online softmax, and results.

Shapes are those of `triton_kernel.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
DOT_PRECISION: tl.constexpr = tl.constexpr("tf32x3")  # for float32: three products in place of one, near float32
WIDE_HEAD_PRECISION: tl.constexpr = tl.constexpr("ieee")  # heads over 128 have no registers for three products
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


class Inputs(NamedTuple):
    """Pointers and numbers that the tiles of a block read; shapes as above."""

    query_ptr: Any
    key_cache_ptr: Any
    value_cache_ptr: Any
    page_table_ptr: Any
    ancestors_ptr: Any
    depth_ptr: Any
    key_scale_ptr: Any
    value_scale_ptr: Any
    scale: Any
    softcap: Any
    window: Any
    num_pages: Any
    max_pages: Any
    num_words: Any


class Strides(NamedTuple):
    """Strides in elements; those that are missing are 1."""

    page_table_row: Any
    query_node: Any
    query_head: Any
    key_page: Any
    key_slot: Any
    key_head: Any
    value_page: Any
    value_slot: Any
    value_head: Any


class Options(NamedTuple):
    """Constants of a kernel. SAME_STRIDES: both caches have the same strides."""

    GROUP_SIZE: Any
    PAGE_SIZE: Any
    HEAD_DIM: Any
    BLOCK_D: Any
    BLOCK_M: Any
    BLOCK_N: Any
    IS_CAUSAL: Any
    HAS_WINDOW: Any
    HAS_SOFTCAP: Any
    HAS_SCALES: Any
    SAME_STRIDES: Any


class Block(NamedTuple):
    """A block of query rows: its request, the request's first node and number of nodes, and its number there."""

    row: Any
    first: Any
    count: Any
    index: Any


@triton.jit
def load_node_range(offsets_ptr, row, num_requests, num_nodes):
    """Returns first node and number of nodes of requests, clamped to `num_nodes` whatever the offsets are."""
    begin = tl.load(offsets_ptr + row, mask=row > 0, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), num_nodes)
    end = tl.load(offsets_ptr + row + 1, mask=row < num_requests, other=num_nodes)
    return begin, tl.maximum(tl.minimum(end, num_nodes), begin) - begin


@triton.jit
def load_pages(pages_ptr, tile, inputs, options):
    """Loads the page ids of a tile's keys, one number if a page holds whole tiles. Ids are clamped to the cache."""
    BLOCK_N: tl.constexpr = options.BLOCK_N
    if options.PAGE_SIZE % BLOCK_N == 0:
        index = tile * BLOCK_N // options.PAGE_SIZE
    else:
        index = (tile * BLOCK_N + tl.arange(0, BLOCK_N)) // options.PAGE_SIZE
    page = tl.load(pages_ptr + index, mask=index < inputs.max_pages, other=0)
    return tl.minimum(tl.maximum(page, 0), inputs.num_pages - 1)


@triton.jit
def apply_softcap(score, softcap):
    """Returns softcap * tanh(score / softcap), accurate to float32 rounding also for small arguments."""
    x = score / softcap
    square = x * x
    series = x * (1.0 + square * (-0.33333334 + square * (0.13333334 + square * (-0.05396825 + square * 0.021869488))))
    whole = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
    return softcap * tl.where(square < 0.09, series, whole)


@triton.jit
def load_ancestor_word(words_ptr, index, node, num_words):
    """Loads word `index` of every query row; 0 if there is none, or the row holds no node (node < 0)."""
    least = tl.where((index >= 0) & (index < num_words), 0, 2147483647)
    return tl.load(words_ptr + index, mask=node >= least, other=0)


@triton.jit
def ancestor_mask(words_ptr, node, first, num_words, BLOCK_N: tl.constexpr):
    """Returns bits first .. first + BLOCK_N - 1 of every row's ancestor words, as booleans [BLOCK_M, BLOCK_N]."""
    key = tl.arange(0, BLOCK_N)
    index = first >> 5
    shift = first & 31
    here = load_ancestor_word(words_ptr, index, node, num_words)
    bits = tl.zeros([node.shape[0], BLOCK_N], tl.int32)
    for group in tl.static_range((BLOCK_N + 31) // 32):
        index += 1
        upcoming = load_ancestor_word(words_ptr, index, node, num_words)
        both = here.to(tl.uint32, bitcast=True).to(tl.uint64)
        both = both | (upcoming.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
        joined = (both >> shift.to(tl.uint64)).to(tl.uint32).to(tl.int32, bitcast=True)
        bits = tl.where((key // 32 == group)[None, :], joined[:, None], bits)
        here = upcoming
    return ((bits >> (key & 31)[None, :]) & 1) != 0


@triton.jit
def attend_tile(
    acc, top, total, queries, node, position, key_cache_ptr, value_cache_ptr, page, tile, words_ptr, depth_ptr, length,
    count, scale, inputs, strides, options, TREE: tl.constexpr,
):  # fmt: skip
    """Online softmax over one tile of keys. TREE: the tile holds nodes of the tree, or ends behind the last of them."""
    PAGE_SIZE: tl.constexpr = options.PAGE_SIZE
    HEAD_DIM: tl.constexpr = options.HEAD_DIM
    BLOCK_D: tl.constexpr = options.BLOCK_D
    BLOCK_N: tl.constexpr = options.BLOCK_N
    precision: tl.constexpr = WIDE_HEAD_PRECISION if BLOCK_D > 128 else DOT_PRECISION
    slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    wide = tl.arange(0, BLOCK_D)
    if BLOCK_N % PAGE_SIZE == 0:
        place = tl.arange(0, BLOCK_N) % PAGE_SIZE  # the same for every tile
    else:
        place = (slot % PAGE_SIZE).to(tl.int64)  # a page may hold a whole row
    k_at = page.to(tl.int64) * strides.key_page + place * strides.key_slot
    v_at = k_at
    if not options.SAME_STRIDES:
        v_at = page.to(tl.int64) * strides.value_page + place * strides.value_slot
    loaded = (slot >= 0)[:, None]
    if TREE:
        loaded = loaded & (slot < length + count)[:, None]
    if HEAD_DIM != BLOCK_D:
        loaded = loaded & (wide < HEAD_DIM)[None, :]
    if TREE or HEAD_DIM != BLOCK_D:
        keys = tl.load(key_cache_ptr + k_at[:, None] + wide[None, :], mask=loaded, other=0.0)
        values = tl.load(value_cache_ptr + v_at[:, None] + wide[None, :], mask=loaded, other=0.0)
    else:
        keys = tl.load(key_cache_ptr + k_at[:, None] + wide[None, :])
        values = tl.load(value_cache_ptr + v_at[:, None] + wide[None, :])
    if keys.dtype != queries.dtype:
        keys = keys.to(tl.float16).to(queries.dtype)  # float8_e4m3fn is exact in float16
        values = values.to(tl.float16).to(queries.dtype)
    score = tl.dot(queries, tl.trans(keys), input_precision=precision) * scale
    if options.HAS_SOFTCAP:
        score = apply_softcap(score, inputs.softcap) * LOG2_E
    if TREE:
        other = slot - length
        if options.IS_CAUSAL:
            visible = other[None, :] <= node[:, None]
        else:
            visible = (other < 0)[None, :] | ancestor_mask(
                words_ptr, node, tile * BLOCK_N - length, inputs.num_words, BLOCK_N
            )
        if options.HAS_WINDOW:
            if options.IS_CAUSAL:
                at = slot
            else:
                inside = (other >= 0) & (other < count)
                at = tl.where(inside, length + tl.load(depth_ptr + other, mask=inside, other=0), slot)
            visible = visible & (position[:, None] - at[None, :] < inputs.window)
        score = tl.where(visible, score, float("-inf"))
    elif options.HAS_WINDOW:
        score = tl.where(position[:, None] - slot[None, :] < inputs.window, score, float("-inf"))
    highest = tl.maximum(top, tl.max(score, axis=1))
    base = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)  # no key seen yet, or an infinite score
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weight, axis=1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=precision)
    return acc, highest, total


@triton.jit
def visible_tiles(
    length, count, block, row, num_requests, max_tiles, window, GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Returns the first tile that a block of query rows may see, and the one behind its last.

    Takes numbers, or tensors of blocks. There are at most `max_tiles` tiles, whatever the lengths are. A block whose
    end does not fit in 32 bits has none.
    """
    last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP_SIZE, count - 1)
    tiles = tl.minimum(tl.cdiv(length + last + 1, BLOCK_N), max_tiles)
    tiles = tl.where(row < num_requests, tiles, 0)  # nodes of no request see nothing
    begin = tl.zeros_like(tiles)
    if HAS_WINDOW:
        nearest = length
        if IS_CAUSAL:
            nearest = length + block * BLOCK_M // GROUP_SIZE
        begin = tl.minimum(tl.maximum(nearest - window + 1, 0) // BLOCK_N, tiles)
    return begin, tiles


@triton.jit
def attend_tiles(inputs, strides, options, block, length, kv_head, lo, hi):
    """Attends from a block of query rows to tiles lo .. hi - 1 of its request's keys.

    Returns:
        The weighted sum of the values, the highest score and the sum of the weights.
    """
    GROUP_SIZE: tl.constexpr = options.GROUP_SIZE
    BLOCK_M: tl.constexpr = options.BLOCK_M
    BLOCK_D: tl.constexpr = options.BLOCK_D
    index = block.index * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = index < block.count * GROUP_SIZE
    node = index // GROUP_SIZE
    head = kv_head * GROUP_SIZE + index % GROUP_SIZE
    dim = tl.arange(0, BLOCK_D)
    query_at = (block.first + node).to(tl.int64) * strides.query_node + head * strides.query_head
    loaded = inside[:, None] & (dim < options.HEAD_DIM)[None, :]
    queries = tl.load(inputs.query_ptr + query_at[:, None] + dim[None, :], mask=loaded, other=0.0)
    words_ptr = inputs.ancestors_ptr
    depth_ptr = inputs.depth_ptr
    position = length + node
    if not options.IS_CAUSAL:
        words_ptr = words_ptr + (block.first + node).to(tl.int64) * inputs.num_words
        node = tl.where(inside, node, -1)
        if options.HAS_WINDOW:
            position = length + tl.load(depth_ptr + block.first + node, mask=inside, other=0)
            depth_ptr += block.first
    scale = inputs.scale
    if options.HAS_SCALES:
        scale = scale * tl.load(inputs.key_scale_ptr + kv_head)
    full = tl.maximum(lo, tl.minimum(hi, length // options.BLOCK_N))
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    pages_ptr = inputs.page_table_ptr + block.row.to(tl.int64) * strides.page_table_row
    key_cache_ptr = inputs.key_cache_ptr + kv_head.to(tl.int64) * strides.key_head
    value_cache_ptr = inputs.value_cache_ptr + kv_head.to(tl.int64) * strides.value_head
    if lo < hi:
        page = load_pages(pages_ptr, lo, inputs, options)
        for tile in range(lo, full):
            upcoming = load_pages(pages_ptr, tile + 1, inputs, options)
            acc, top, total = attend_tile(
                acc, top, total, queries, node, position, key_cache_ptr, value_cache_ptr, page, tile, words_ptr,
                depth_ptr, length, block.count, scale, inputs, strides, options, False,
            )  # fmt: skip
            page = upcoming
        for tile in range(full, hi):
            upcoming = load_pages(pages_ptr, tile + 1, inputs, options)
            acc, top, total = attend_tile(
                acc, top, total, queries, node, position, key_cache_ptr, value_cache_ptr, page, tile, words_ptr,
                depth_ptr, length, block.count, scale, inputs, strides, options, True,
            )  # fmt: skip
            page = upcoming
    if options.HAS_SCALES:
        acc = acc * tl.load(inputs.value_scale_ptr + kv_head)
    return acc, top, total


@triton.jit
def write_output(
    acc, top, total, rows, head, inside, has_request, sinks_ptr, out_ptr, lse_ptr, out_node_stride, out_head_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Writes the results of a block that has seen all keys. Only nodes of a request (`has_request`) have sinks."""
    wide = tl.arange(0, BLOCK_D)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        sink = tl.where(has_request, sink, float("-inf"))
        highest = tl.maximum(top, sink)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.exp2(sink - base)
        acc = acc * shrink[:, None]
        top = highest
    mean = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    o_at = rows * out_node_stride + head * out_head_stride
    store = inside[:, None] & (wide < HEAD_DIM)[None, :]
    tl.store(out_ptr + o_at[:, None] + wide[None, :], mean.to(out_ptr.dtype.element_ty), mask=store)
    if HAS_LSE:
        value = tl.where(total == 0.0, float("-inf"), (top + tl.log2(tl.where(total == 0.0, 1.0, total))) * LN_2)
        tl.store(lse_ptr + rows * NUM_HEADS + head, value, mask=inside)


@triton.jit
def write_partial(
    acc, top, total, at, inside, partial_ptr, partial_lse_ptr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Writes the weighted means of a block that has seen some keys, and log2 of its weights' sum, at rows `at`."""
    wide = tl.arange(0, BLOCK_D)
    mean = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    value = tl.where(total == 0.0, float("-inf"), top + tl.log2(tl.where(total == 0.0, 1.0, total)))
    tl.store(partial_lse_ptr + at, value, mask=inside)
    seen = inside & (total != 0.0)
    tl.store(
        partial_ptr + at[:, None] * HEAD_DIM + wide[None, :], mean, mask=seen[:, None] & (wide < HEAD_DIM)[None, :]
    )
