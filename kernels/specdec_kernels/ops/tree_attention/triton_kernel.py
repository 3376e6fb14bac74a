"""Triton kernels of tree_attention: `attend` over pieces of the keys, `combine` joins them.

One program of `attend` owns BLOCK_M query rows of one request and one key/value head (a query row is a node and one of
the GROUP heads that share the key/value head), and one piece of the request's keys. Tiles of BLOCK_N keys lie at
multiples of BLOCK_N of the absolute slot. Tiles wholly inside the committed prefix need no mask at all; the last one
of the prefix and the tree's own share a second loop, where a key is visible if it is committed or an ancestor.
Scores are in units of log2, so that weights are powers of two. Nothing is read from the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.jit import kernel

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
PRECISION: tl.constexpr = tl.constexpr("tf32x3")  # of float32 only: three products in place of one, near float32
WIDE_PRECISION: tl.constexpr = tl.constexpr("ieee")  # heads over 128 have no registers for three: plain float32
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
WIDE = (
    "query", "key_cache", "value_cache", "out", "part", "q_node", "q_head", "k_page", "k_slot", "k_head", "v_page",
    "v_slot", "v_head", "o_node", "o_head",
)  # fmt: skip
"""Arguments that wide loads and stores of heads specialise, for `jit_triton.kernel`."""


@triton.jit
def locate(offsets, block, batch, nodes, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr):
    """Request, its first node, its number of nodes and the block's number within it.

    Request b takes blocks offsets[b] * GROUP // BLOCK_M + b and following: always enough, known without a plan. The
    nodes that belong to no request are request `batch`.
    """
    row = tl.arange(0, BLOCK_B)
    first = tl.load(offsets + row, mask=(row > 0) & (row <= batch), other=0)
    start = tl.minimum(tl.maximum(first, 0), nodes) * GROUP // BLOCK_M + row
    found = tl.sum(((row <= batch) & (start <= block)).to(tl.int32), axis=0) - 1
    begin, count = nodes_of(offsets, found, batch, nodes)
    return found, begin, count, block - (begin * GROUP // BLOCK_M + found)


@triton.jit
def nodes_of(offsets, row, batch, nodes):
    """First node of requests and their numbers of nodes, all of them within `nodes` whatever the offsets are."""
    begin = tl.load(offsets + row, mask=row > 0, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), nodes)
    end = tl.load(offsets + row + 1, mask=row < batch, other=nodes)
    return begin, tl.maximum(tl.minimum(end, nodes), begin) - begin


@triton.jit
def page_of(table, tile, pages, pages_per_row, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids of a tile's keys: one number where a page holds whole tiles. Never an id outside of the cache."""
    if PAGE % BLOCK_N == 0:
        index = tile * BLOCK_N // PAGE
    else:
        index = (tile * BLOCK_N + tl.arange(0, BLOCK_N)) // PAGE
    page = tl.load(table + index, mask=index < pages_per_row, other=0)
    return tl.minimum(tl.maximum(page, 0), pages - 1)


@triton.jit
def bounded(score, softcap):
    """softcap * tanh(score / softcap), to float32 rounding also where the argument is small."""
    x = score / softcap
    square = x * x
    series = x * (1.0 + square * (-0.33333334 + square * (0.13333334 + square * (-0.05396825 + square * 0.021869488))))
    whole = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
    return softcap * tl.where(square < 0.09, series, whole)


@triton.jit
def load_word(words, index, node, words_per_node):
    """Word `index` of every row; 0 where there is none, or the row holds no node (node < 0)."""
    least = tl.where((index >= 0) & (index < words_per_node), 0, 2147483647)
    return tl.load(words + index, mask=node >= least, other=0)


@triton.jit
def ancestor(words, node, first, words_per_node, BLOCK_N: tl.constexpr):
    """Bits first .. first + BLOCK_N - 1 of every row's ancestor words, as booleans [BLOCK_M, BLOCK_N]."""
    key = tl.arange(0, BLOCK_N)
    index = first >> 5
    shift = first & 31
    here = load_word(words, index, node, words_per_node)
    bits = tl.zeros([node.shape[0], BLOCK_N], tl.int32)
    for group in tl.static_range((BLOCK_N + 31) // 32):
        index += 1
        upcoming = load_word(words, index, node, words_per_node)
        both = here.to(tl.uint32, bitcast=True).to(tl.uint64)
        both = both | (upcoming.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
        joined = (both >> shift.to(tl.uint64)).to(tl.uint32).to(tl.int32, bitcast=True)
        bits = tl.where((key // 32 == group)[None, :], joined[:, None], bits)
        here = upcoming
    return ((bits >> (key & 31)[None, :]) & 1) != 0


@triton.jit
def tile_step(
    acc, top, total, queries, node, position, key_cache, value_cache, page, tile, words, words_per_node, length, count,
    scale, softcap, window, depth, k_page, k_slot, v_page, v_slot,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIKE: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Online softmax over one tile of keys. TREE: the tile holds nodes, or ends behind the last of them."""
    precision: tl.constexpr = WIDE_PRECISION if BLOCK_D > 128 else PRECISION
    slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    wide = tl.arange(0, BLOCK_D)
    if BLOCK_N % PAGE == 0:
        place = tl.arange(0, BLOCK_N) % PAGE  # the same for every tile
    else:
        place = (slot % PAGE).to(tl.int64)  # a page may hold a whole row
    k_at = page.to(tl.int64) * k_page + place * k_slot
    v_at = k_at
    if not ALIKE:
        v_at = page.to(tl.int64) * v_page + place * v_slot
    loaded = (slot >= 0)[:, None]
    if TREE:
        loaded = loaded & (slot < length + count)[:, None]
    if WIDTH != BLOCK_D:
        loaded = loaded & (wide < WIDTH)[None, :]
    if TREE or WIDTH != BLOCK_D:
        keys = tl.load(key_cache + k_at[:, None] + wide[None, :], mask=loaded, other=0.0)
        values = tl.load(value_cache + v_at[:, None] + wide[None, :], mask=loaded, other=0.0)
    else:
        keys = tl.load(key_cache + k_at[:, None] + wide[None, :])
        values = tl.load(value_cache + v_at[:, None] + wide[None, :])
    if keys.dtype != queries.dtype:
        keys = keys.to(tl.float16).to(queries.dtype)  # float8_e4m3fn is exact in float16
        values = values.to(tl.float16).to(queries.dtype)
    score = tl.dot(queries, tl.trans(keys), input_precision=precision) * scale
    if SOFTCAP:
        score = bounded(score, softcap) * LOG2_E
    if TREE:
        other = slot - length
        if CAUSAL:
            visible = other[None, :] <= node[:, None]
        else:
            visible = (other < 0)[None, :] | ancestor(words, node, tile * BLOCK_N - length, words_per_node, BLOCK_N)
        if WINDOW:
            if CAUSAL:
                at = slot
            else:
                inside = (other >= 0) & (other < count)
                at = tl.where(inside, length + tl.load(depth + other, mask=inside, other=0), slot)
            visible = visible & (position[:, None] - at[None, :] < window)
        score = tl.where(visible, score, float("-inf"))
    elif WINDOW:
        score = tl.where(position[:, None] - slot[None, :] < window, score, float("-inf"))
    highest = tl.maximum(top, tl.max(score, axis=1))
    base = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)  # nothing seen yet, or a score beyond all numbers
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weight, axis=1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=precision)
    return acc, highest, total


@triton.jit
def tile_range(
    length, count, block, row, batch, most, window, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """First tile that a block of query rows may see, and the one behind its last; numbers or tensors of blocks. At most
    `most` tiles, whatever the lengths are; one whose end does not fit in 32 bits has none."""
    last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, count - 1)
    tiles = tl.minimum(tl.cdiv(length + last + 1, BLOCK_N), most)
    tiles = tl.where(row < batch, tiles, 0)  # the nodes of no request see nothing
    begin = tl.zeros_like(tiles)
    if WINDOW:
        nearest = length
        if CAUSAL:
            nearest = length + block * BLOCK_M // GROUP
        begin = tl.minimum(tl.maximum(nearest - window + 1, 0) // BLOCK_N, tiles)
    return begin, tiles


@triton.jit
def attend_tiles(
    query, key_cache, value_cache, table, ancestors, depth, key_scale, value_scale, scale, softcap, window, pages,
    pages_per_row, table_row, words_per_node, q_node, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head,
    row, first, count, block, length, kv_head, lo, hi,
    GROUP: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr,
    ALIKE: tl.constexpr,
):  # fmt: skip
    """Block `block` of request `row` (nodes first .. first + count - 1) over tiles lo .. hi - 1 of its keys: weighted
    sum of the values, highest score, sum of the weights."""
    index = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = index < count * GROUP
    node = index // GROUP
    head = kv_head * GROUP + index % GROUP
    wide = tl.arange(0, BLOCK_D)
    q_at = (first + node).to(tl.int64) * q_node + head * q_head
    queries = tl.load(query + q_at[:, None] + wide[None, :], mask=inside[:, None] & (wide < WIDTH)[None, :], other=0.0)
    words = ancestors
    position = length + node
    if not CAUSAL:
        words = ancestors + (first + node).to(tl.int64) * words_per_node
        node = tl.where(inside, node, -1)
        if WINDOW:
            position = length + tl.load(depth + first + node, mask=inside, other=0)
            depth += first
    if SCALED:
        scale = scale * tl.load(key_scale + kv_head)
    full = tl.maximum(lo, tl.minimum(hi, length // BLOCK_N))
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table += row.to(tl.int64) * table_row
    key_cache += kv_head.to(tl.int64) * k_head
    value_cache += kv_head.to(tl.int64) * v_head
    if lo < hi:
        page = page_of(table, lo, pages, pages_per_row, PAGE, BLOCK_N)
        for tile in range(lo, full):
            upcoming = page_of(table, tile + 1, pages, pages_per_row, PAGE, BLOCK_N)
            acc, top, total = tile_step(
                acc, top, total, queries, node, position, key_cache, value_cache, page, tile, words,
                words_per_node, length, count, scale, softcap, window, depth, k_page, k_slot, v_page, v_slot,
                PAGE, WIDTH, BLOCK_D, BLOCK_N, CAUSAL, WINDOW, SOFTCAP, ALIKE, False,
            )  # fmt: skip
            page = upcoming
        for tile in range(full, hi):
            upcoming = page_of(table, tile + 1, pages, pages_per_row, PAGE, BLOCK_N)
            acc, top, total = tile_step(
                acc, top, total, queries, node, position, key_cache, value_cache, page, tile, words,
                words_per_node, length, count, scale, softcap, window, depth, k_page, k_slot, v_page, v_slot,
                PAGE, WIDTH, BLOCK_D, BLOCK_N, CAUSAL, WINDOW, SOFTCAP, ALIKE, True,
            )  # fmt: skip
            page = upcoming
    if SCALED:
        acc = acc * tl.load(value_scale + kv_head)
    return acc, top, total


@triton.jit
def write_answer(
    acc, top, total, rows, head, inside, sees, sinks, out, lse, o_node, o_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Answers of a block that has seen all keys. sees: whether its nodes belong to a request, and so have sinks."""
    wide = tl.arange(0, BLOCK_D)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        sink = tl.where(sees, sink, float("-inf"))
        highest = tl.maximum(top, sink)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.exp2(sink - base)
        acc = acc * shrink[:, None]
        top = highest
    mean = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    o_at = rows * o_node + head * o_head
    store = inside[:, None] & (wide < WIDTH)[None, :]
    tl.store(out + o_at[:, None] + wide[None, :], mean.to(out.dtype.element_ty), mask=store)
    if LSE:
        value = tl.where(total == 0.0, float("-inf"), (top + tl.log2(tl.where(total == 0.0, 1.0, total))) * LN_2)
        tl.store(lse + rows * HEADS + head, value, mask=inside)


@triton.jit
def write_part(acc, top, total, at, inside, part, part_lse, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Weighted means and log2 of the weights' sum of a block that has seen some of its keys, at rows `at`."""
    wide = tl.arange(0, BLOCK_D)
    mean = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    value = tl.where(total == 0.0, float("-inf"), top + tl.log2(tl.where(total == 0.0, 1.0, total)))
    tl.store(part_lse + at, value, mask=inside)
    seen = inside & (total != 0.0)
    tl.store(part + at[:, None] * WIDTH + wide[None, :], mean, mask=seen[:, None] & (wide < WIDTH)[None, :])


@kernel(*WIDE)
def attend(
    query, key_cache, value_cache, table, lengths, offsets, ancestors, depth, sinks, out, lse, part, part_lse,
    key_scale, value_scale, scale, softcap, window, batch, nodes, pages, pages_per_row, table_row, words_per_node,
    q_node, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, o_node, o_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, PIECES: tl.constexpr,
    PIECE_TILES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, SCALED: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    """Attention of a block of query rows over one piece of the keys of their request.

    Grid (blocks, key/value heads, PIECES). PIECE_TILES: tiles of a piece, at fixed absolute slots; 0: an equal share.
    ALIKE: both caches have the same strides. One piece writes `out`, several write `part` (float32 [PIECES, M, H,
    WIDTH], weighted means) and `part_lse` (float32 [PIECES, M, H], log2 of the weights' sum).
    """
    kv_head = tl.program_id(1)
    piece = tl.program_id(2)
    row, first, count, block = locate(offsets, tl.program_id(0), batch, nodes, GROUP, BLOCK_M, BLOCK_B)
    if (block < 0) | (block * BLOCK_M >= count * GROUP):
        return
    length, room = tl.load(lengths + row, mask=row < batch, other=0), tl.cdiv(pages_per_row * PAGE, BLOCK_N)
    begin, tiles = tile_range(length, count, block, row, batch, room, window, GROUP, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
    if PIECE_TILES:
        lo = tl.maximum(begin, piece * PIECE_TILES)
        hi = tl.minimum(tiles, (piece + 1) * PIECE_TILES)
    else:
        share = tl.cdiv(tl.maximum(tiles - begin, 0), PIECES)
        lo = begin + piece * share
        hi = tl.minimum(tiles, lo + share)
    acc, top, total = attend_tiles(
        query, key_cache, value_cache, table, ancestors, depth, key_scale, value_scale, scale, softcap, window, pages,
        pages_per_row, table_row, words_per_node, q_node, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head,
        row, first, count, block, length, kv_head, lo, hi,
        GROUP, PAGE, WIDTH, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, SOFTCAP, SCALED, ALIKE,
    )  # fmt: skip
    index = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = index < count * GROUP
    rows = (first + tl.where(inside, index // GROUP, 0)).to(tl.int64)
    head = kv_head * GROUP + index % GROUP
    if PIECES == 1:
        write_answer(
            acc, top, total, rows, head, inside, row < batch, sinks, out, lse, o_node, o_head,
            HEADS, WIDTH, BLOCK_D, SINKS, LSE,
        )  # fmt: skip
    else:
        at = (piece.to(tl.int64) * nodes + rows) * HEADS + head
        write_part(acc, top, total, at, inside, part, part_lse, WIDTH, BLOCK_D)


@kernel("part", "out", "o_node", "o_head")
def combine(
    part, part_lse, sinks, offsets, out, lse, batch, nodes, o_node, o_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
    PIECES: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Joins the pieces of one node and BLOCK_H heads, BLOCK_P pieces at a time. Grid (nodes, blocks of heads)."""
    node = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    wide = tl.arange(0, BLOCK_D)
    inside = head < HEADS
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    if SINKS:  # part of the softmax of every node that belongs to a request
        mine = head < tl.where(node < tl.load(offsets + batch), HEADS, 0)
        top = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32) * LOG2_E
        top = tl.where(mine, top, float("-inf"))
        total = tl.where(mine, 1.0, 0.0)
    for start in range(0, PIECES, BLOCK_P):
        piece = start + tl.arange(0, BLOCK_P)
        at = (piece.to(tl.int64)[:, None] * nodes + node) * HEADS + head[None, :]
        size = tl.load(part_lse + at, mask=(piece < PIECES)[:, None] & inside[None, :], other=float("-inf"))
        seen = (size != float("-inf"))[:, :, None] & (wide < WIDTH)[None, None, :]
        mean = tl.load(part + at[:, :, None] * WIDTH + wide[None, None, :], mask=seen, other=0.0)
        highest = tl.maximum(top, tl.max(size, axis=0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        old = tl.exp2(top - base)
        new = tl.exp2(size - base[None, :])
        total = total * old + tl.sum(new, axis=0)
        acc = acc * old[:, None] + tl.sum(mean * new[:, :, None], axis=0)
        top = highest
    mean = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    store = inside[:, None] & (wide < WIDTH)[None, :]
    at = node * o_node + head * o_head
    tl.store(out + at[:, None] + wide[None, :], mean.to(out.dtype.element_ty), mask=store)
    if LSE:
        value = tl.where(total == 0.0, float("-inf"), (top + tl.log2(tl.where(total == 0.0, 1.0, total))) * LN_2)
        tl.store(lse + node * HEADS + head, value, mask=inside)
