"""Triton kernels of tree_expand: the best children of each piece of a row, of each node, and of each tree."""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.distribution import LAST_ID, NEGATIVE_INFINITY, id_of_key, logit_of_key, order_key
from ...triton_shared.jit import kernel
from ...triton_shared.overlay import load_tile
from ...triton_shared.random import REPLAY, gumbel_span
from ...triton_shared.tree_links import row_bounds

LOWEST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
INFINITY = tl.constexpr(float("inf"))


@kernel("logits", "vocab", "stride")
def pieces(
    logits, inv_t, cut, tie_id, scores, seeds, positions, ranks, peaks, sums, vocab, stride, width, sharpness,
    TILE: tl.constexpr, NOISE: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (nodes, pieces of TILE logits): ranks of the `width` best values z of a piece, the largest of them, and the
    sum of exp(sharpness * (z - largest)). Greedy nodes and those without children are left alone."""
    node = tl.program_id(0).to(tl.int64)
    at = node * tl.num_programs(1) + tl.program_id(1)
    scale, least, tie = tl.load(inv_t + node), tl.load(cut + node), tl.load(tie_id + node)
    if (scale != 0) & (least == least) & (tl.load(scores + node) > NEGATIVE_INFINITY):
        first = tl.program_id(1) * TILE
        ids = first + tl.arange(0, TILE)
        end = first + TILE if UNALIGNED else None
        level = load_tile(logits + node * stride, ids, ids < vocab, vocab, end, NEGATIVE_INFINITY).to(tl.float32)
        kept = (ids < vocab) & ((level > least) | ((level == least) & (ids <= tie)))
        z = level * scale
        if NOISE:
            position = tl.load(positions + node)
            if (position >= 0) & (tl.max(kept.to(tl.int32), 0) > 0):
                z = z + gumbel_span(tl.load(seeds + node), position, 0, REPLAY, first, TILE)
        z = tl.where(kept, z, NEGATIVE_INFINITY)
        peak = tl.max(z, 0)
        weight = tl.where(z > NEGATIVE_INFINITY, tl.exp(sharpness * (z - peak)), 0.0)
        tl.store(peaks + at, peak)
        tl.store(sums + at, tl.sum(weight, 0))
        ranked = order_key(z, ids)
        for place in range(width):
            best = tl.max(ranked, 0)
            tl.store(ranks + at * width + place, best)
            ranked = tl.where(ranked == best, LOWEST, ranked)


@kernel()
def join(
    inv_t, cut, tie_id, scores, ranks, peaks, sums, tokens, found, count, width, sharpness,
    PIECES: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Grid (nodes): children of a node out of `count` pieces, and their scores. PLACES: room for all ranks."""
    node = tl.program_id(0).to(tl.int64)
    scale, least, parent = tl.load(inv_t + node), tl.load(cut + node), tl.load(scores + node)
    fertile = (parent > NEGATIVE_INFINITY) & (least == least)
    if fertile & (scale != 0):
        piece = tl.arange(0, PIECES)
        peak = tl.load(peaks + node * count + piece, mask=piece < count, other=NEGATIVE_INFINITY)
        mass = tl.load(sums + node * count + piece, mask=piece < count, other=0.0).to(tl.float64)
        top = tl.max(peak, 0)
        part = mass * tl.exp((peak - top).to(tl.float64) * sharpness)
        total = tl.sum(tl.where(peak > NEGATIVE_INFINITY, part, 0.0), 0)
        norm = (top.to(tl.float64) * sharpness + tl.log(total)).to(tl.float32)
        finite = tl.abs(norm) < INFINITY  # false for NaN
        place = tl.arange(0, PLACES)
        ranked = tl.load(ranks + node * count * width + place, mask=place < count * width, other=LOWEST)
        for child in range(width):
            best = tl.max(ranked, 0)
            level = logit_of_key(best)
            there = finite & (best > LOWEST) & (level > NEGATIVE_INFINITY)
            score = parent + tl.minimum(level * sharpness - norm, 0.0)
            tl.store(tokens + node * width + child, tl.where(there, id_of_key(best), -1).to(tl.int64))
            tl.store(found + node * width + child, tl.where(there, score, NEGATIVE_INFINITY))
            ranked = tl.where(ranked == best, LOWEST, ranked)
    else:
        for child in range(width):
            only = fertile & (child == 0)
            tl.store(tokens + node * width + child, tl.where(only, tl.load(tie_id + node), -1).to(tl.int64))
            tl.store(found + node * width + child, tl.where(only, parent, NEGATIVE_INFINITY))


@kernel()
def keep_best(offsets, scores, best, nodes, width, keep, BLOCK: tl.constexpr):
    """Grid (trees): flat indices of a tree's `keep` best children, by as many walks over their scores."""
    tree = tl.program_id(0)
    first, end = row_bounds(offsets, tree, nodes)
    first = first * width
    end = end * width
    nothing = order_key(tl.full((), NEGATIVE_INFINITY, tl.float32), LAST_ID)
    previous = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for place in range(keep):
        found = nothing
        for start in range(first, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            ranked = order_key(tl.load(scores + at, mask=at < end, other=NEGATIVE_INFINITY), at)
            found = tl.maximum(found, tl.max(tl.where(ranked < previous, ranked, nothing), 0))
        there = logit_of_key(found) > NEGATIVE_INFINITY
        tl.store(best + tree.to(tl.int64) * keep + place, tl.where(there, id_of_key(found), -1))
        previous = found
