"""Triton kernels of tree_expand: the best children of each piece of a row, of each node, and of each tree.

Shapes: N = nodes, V = vocab_size, P = num_pieces of TILE logits per row, B = trees.
    logits: [N, V], any row stride
    inv_t, cut, tie_id, scores, seeds, positions: [N]
    ranks: int64 [N, P, width], an `order_key` each; peaks, sums: float32 [N, P]
    tokens: int64 [N, width]; child_scores: float32 [N, width]
    offsets: int32 [B + 1]; best: int32 [B, keep]
"""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.distribution import LAST_ID, NEGATIVE_INFINITY, id_of_key, logit_of_key, order_key
from ...triton_shared.jit import kernel
from ...triton_shared.overlay import load_tile
from ...triton_shared.random import REPLAY, gumbel_span
from ...triton_shared.tree_links import row_bounds

LOWEST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
INFINITY = tl.constexpr(float("inf"))


@kernel("logits_ptr", "vocab_size", "logits_stride")
def pieces(
    logits_ptr, inv_t_ptr, cut_ptr, tie_id_ptr, scores_ptr, seeds_ptr, positions_ptr, ranks_ptr, peaks_ptr, sums_ptr,
    vocab_size, logits_stride, width, sharpness, TILE: tl.constexpr, NOISE: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid: (nodes, pieces of TILE logits).

    Stores the ranks of the `width` best values z of a piece, the largest z (peak), and the sum of
    exp(sharpness * (z - peak)). Writes nothing for greedy nodes and for nodes without children.
    """
    node = tl.program_id(0).to(tl.int64)
    at = node * tl.num_programs(1) + tl.program_id(1)
    inv_t, cut, tie_id = tl.load(inv_t_ptr + node), tl.load(cut_ptr + node), tl.load(tie_id_ptr + node)
    if (inv_t != 0) & (cut == cut) & (tl.load(scores_ptr + node) > NEGATIVE_INFINITY):
        first = tl.program_id(1) * TILE
        ids = first + tl.arange(0, TILE)
        end = first + TILE if UNALIGNED else None
        row_ptr = logits_ptr + node * logits_stride
        level = load_tile(row_ptr, ids, ids < vocab_size, vocab_size, end, NEGATIVE_INFINITY).to(tl.float32)
        kept = (ids < vocab_size) & ((level > cut) | ((level == cut) & (ids <= tie_id)))
        z = level * inv_t
        if NOISE:
            position = tl.load(positions_ptr + node)
            if (position >= 0) & (tl.max(kept.to(tl.int32), 0) > 0):
                z = z + gumbel_span(tl.load(seeds_ptr + node), position, 0, REPLAY, first, TILE)
        z = tl.where(kept, z, NEGATIVE_INFINITY)
        peak = tl.max(z, 0)
        weight = tl.where(z > NEGATIVE_INFINITY, tl.exp(sharpness * (z - peak)), 0.0)
        tl.store(peaks_ptr + at, peak)
        tl.store(sums_ptr + at, tl.sum(weight, 0))
        ranked = order_key(z, ids)
        for place in range(width):
            best = tl.max(ranked, 0)
            tl.store(ranks_ptr + at * width + place, best)
            ranked = tl.where(ranked == best, LOWEST, ranked)


@kernel()
def join(
    inv_t_ptr, cut_ptr, tie_id_ptr, scores_ptr, ranks_ptr, peaks_ptr, sums_ptr, tokens_ptr, child_scores_ptr,
    num_pieces, width, sharpness, PIECES: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Grid: (nodes,). Selects the children of a node among the best of all its pieces, and computes their scores.

    PIECES: lanes for `num_pieces` pieces. RANKS: lanes for the `num_pieces * width` ranks of a node.
    """
    node = tl.program_id(0).to(tl.int64)
    inv_t, cut, parent_score = tl.load(inv_t_ptr + node), tl.load(cut_ptr + node), tl.load(scores_ptr + node)
    has_children = (parent_score > NEGATIVE_INFINITY) & (cut == cut)
    if has_children & (inv_t != 0):
        piece = tl.arange(0, PIECES)
        inside = piece < num_pieces
        peak = tl.load(peaks_ptr + node * num_pieces + piece, mask=inside, other=NEGATIVE_INFINITY)
        mass = tl.load(sums_ptr + node * num_pieces + piece, mask=inside, other=0.0).to(tl.float64)
        top = tl.max(peak, 0)
        scaled_mass = mass * tl.exp((peak - top).to(tl.float64) * sharpness)
        total = tl.sum(tl.where(peak > NEGATIVE_INFINITY, scaled_mass, 0.0), 0)
        norm = (top.to(tl.float64) * sharpness + tl.log(total)).to(tl.float32)
        finite = tl.abs(norm) < INFINITY  # false for NaN
        at = tl.arange(0, RANKS)
        ranked = tl.load(ranks_ptr + node * num_pieces * width + at, mask=at < num_pieces * width, other=LOWEST)
        for child in range(width):
            best = tl.max(ranked, 0)
            level = logit_of_key(best)
            exists = finite & (best > LOWEST) & (level > NEGATIVE_INFINITY)
            score = parent_score + tl.minimum(level * sharpness - norm, 0.0)
            tl.store(tokens_ptr + node * width + child, tl.where(exists, id_of_key(best), -1).to(tl.int64))
            tl.store(child_scores_ptr + node * width + child, tl.where(exists, score, NEGATIVE_INFINITY))
            ranked = tl.where(ranked == best, LOWEST, ranked)
    else:
        for child in range(width):
            only = has_children & (child == 0)
            tl.store(tokens_ptr + node * width + child, tl.where(only, tl.load(tie_id_ptr + node), -1).to(tl.int64))
            tl.store(child_scores_ptr + node * width + child, tl.where(only, parent_score, NEGATIVE_INFINITY))


@kernel()
def keep_best(offsets_ptr, child_scores_ptr, best_ptr, num_nodes, width, keep, BLOCK: tl.constexpr):
    """Grid: (trees,). Stores the flat indices of a tree's `keep` best children, with one pass over all scores each."""
    tree = tl.program_id(0)
    first, end = row_bounds(offsets_ptr, tree, num_nodes)
    first = first * width
    end = end * width
    nothing = order_key(tl.full((), NEGATIVE_INFINITY, tl.float32), LAST_ID)
    previous = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for place in range(keep):
        best = nothing
        for start in range(first, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            ranked = order_key(tl.load(child_scores_ptr + at, mask=at < end, other=NEGATIVE_INFINITY), at)
            best = tl.maximum(best, tl.max(tl.where(ranked < previous, ranked, nothing), 0))
        exists = logit_of_key(best) > NEGATIVE_INFINITY
        tl.store(best_ptr + tree.to(tl.int64) * keep + place, tl.where(exists, id_of_key(best), -1))
        previous = best
