"""Triton kernels of typical_verify: entropies of all distributions side by side, then one program per row.

What counts in the second is which nodes a way of typical tokens leads to. Each looks upwards on its own; the deepest
mark the way they came, and the walk down takes the first marked child.
"""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.distribution import token_weights
from ...triton_shared.jit import kernel
from ...triton_shared.random import logarithm
from ...triton_shared.residual import log_weights_at
from ...triton_shared.tree_links import climb_to_root, follow_link, pad_path, row_bounds, store_parents
from ..draft_sample.triton_kernel import SMALLEST


@kernel("logits", "stride", "width")
def entropies(
    logits, inv_t, lse, cut, tie_id, stride, width, cells, room, first_child, sums, pieces, TILE: tl.constexpr,
    FOLD: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """-sum p log p over TILE tokens of a node's distribution, if the node has children."""
    node, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(first_child + node) >= 0:
        scale, norm = tl.load(inv_t + node), tl.load(lse + node)
        total = tl.zeros((), tl.float64)
        if (scale != 0) & (norm == norm):
            ids = piece * TILE + tl.arange(0, TILE)
            cut_at, tie = tl.load(cut + node), tl.load(tie_id + node)
            own = cells + node * room
            end = (piece + 1) * TILE
            weight = token_weights(
                logits + node * stride,
                own,
                room,
                ids,
                width,
                scale,
                norm,
                cut_at,
                tie,
                FOLD,
                end if UNALIGNED else None,
            )
            part = weight * logarithm(tl.maximum(weight, SMALLEST))
            total -= tl.sum(part.to(tl.float64), 0)
        tl.store(sums + node * pieces + piece, total)


@kernel()
def walk(
    logits, inv_t, lse, cut, tie_id, stride, width, cells, room, tokens, offsets, first_child, next_sibling, score_only,
    sums, parents, marks, path, accepted, last, epsilon, delta, pieces, nodes, depth, TILE: tl.constexpr,
    SCORE_ONLY: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """The longest path of typical tokens of one row; of several the one whose nodes come first among siblings."""
    row = tl.program_id(0)
    out = path + row.to(tl.int64) * (depth + 1)
    root, end = row_bounds(offsets, row, nodes)
    dist = (logits, inv_t, lse, cut, tie_id, stride, width, cells, room)
    store_parents(parents, first_child, next_sibling, root, end, TILE)
    for start in range(root, end, TILE):  # no way leads to a token that is not typical
        node = start + tl.arange(0, TILE)
        parent = tl.load(parents + node, mask=node < end, other=-1)
        proposes = parent >= 0
        if SCORE_ONLY:
            proposes = proposes & (tl.load(score_only + node, mask=proposes, other=1) == 0)
        entropy = tl.zeros((TILE,), tl.float64)
        for piece in range(pieces):
            entropy += tl.load(sums + parent.to(tl.int64) * pieces + piece, mask=proposes, other=0.0)
        limit = tl.minimum(tl.exp(-entropy) * delta, epsilon)
        token = tl.load(tokens + node, mask=proposes, other=-1)
        weight = tl.exp(log_weights_at(dist, parent, token, proposes, FOLD)).to(tl.float64)
        tl.store(parents + node, tl.where(proposes & (weight > limit), parent, -1), mask=node < end)
        tl.store(marks + node, tl.zeros((TILE,), tl.int32), mask=node < end)
    tl.debug_barrier()
    longest = tl.zeros((), tl.int32)
    for start in range(root, end, TILE):
        node = start + tl.arange(0, TILE)
        top, steps = climb_to_root(parents, tl.where(node < end, node, -1), root)
        longest = tl.maximum(longest, tl.max(tl.where(top == root, steps, 0), 0))
    for start in range(root, end, TILE):
        node = start + tl.arange(0, TILE)
        top, steps = climb_to_root(parents, tl.where(node < end, node, -1), root)
        at = tl.where((top == root) & (steps == longest), node, -1)
        while tl.max(at, 0) > root:
            tl.store(marks + at, tl.full((TILE,), 1, tl.int32), mask=at > root)
            at = tl.load(parents + at, mask=at > root, other=-1)
    tl.debug_barrier()
    node = tl.where(root < end, root, -1)
    final = node
    length = tl.zeros((), tl.int32)
    while node >= 0:
        tl.store(out + length, node)
        final = node
        length += 1
        child = follow_link(first_child, node, end, length <= depth)
        node = node * 0 - 1
        while (child >= 0) & (node < 0):
            node = tl.where(tl.load(marks + child) != 0, child, -1)
            child = follow_link(next_sibling, child, end, child >= 0)
    pad_path(out, length, depth)
    tl.store(accepted + row, tl.maximum(length - 1, 0))
    tl.store(last + row, final)
