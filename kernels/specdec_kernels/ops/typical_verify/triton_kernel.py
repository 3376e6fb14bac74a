"""Triton kernels of typical_verify: entropies of all distributions in parallel, then one program per row.

The second kernel finds the nodes that a path of typical tokens reaches. Each node climbs on its own. The deepest ones
mark their way, and the walk down takes the first marked child.

Shapes: M = num_nodes packed nodes of B rows, V = num_columns, P = num_pieces tiles of a distribution.
    logits_ptr [M, V]; inv_t_ptr, lse_ptr, cut_ptr float32 [M]; tie_id_ptr int32 [M]
    overlay_ptr int32 [M, overlay_stride]
    tokens_ptr int64 [M], offsets_ptr int32 [B + 1], score_only_ptr int8 [M]
    first_child_ptr, next_sibling_ptr int32 [M]
    entropy_ptr float64 [M, P], parents_ptr int32 [M], marks_ptr int32 [M]
    path_ptr int32 [B, max_depth + 1], num_accepted_ptr int32 [B], last_node_ptr int32 [B]
"""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.distribution import token_weights
from ...triton_shared.jit import kernel
from ...triton_shared.random import logarithm
from ...triton_shared.residual import Distributions, log_weights_at
from ...triton_shared.tree_links import climb_to_root, follow_link, pad_path, row_bounds, store_parents
from ..draft_sample.triton_kernel import SMALLEST


@kernel("logits_ptr", "logits_stride", "num_columns")
def compute_entropies(
    logits_ptr, inv_t_ptr, lse_ptr, cut_ptr, tie_id_ptr, logits_stride, num_columns, overlay_ptr, overlay_stride,
    first_child_ptr, entropy_ptr, num_pieces, TILE: tl.constexpr, HAS_OVERLAY: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (M, P): -sum p log p over TILE tokens of a node's distribution, if the node has children."""
    node, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(first_child_ptr + node) >= 0:
        inv_t, lse = tl.load(inv_t_ptr + node), tl.load(lse_ptr + node)
        entropy = tl.zeros((), tl.float64)
        if (inv_t != 0) & (lse == lse):
            ids = piece * TILE + tl.arange(0, TILE)
            cut, tie_id = tl.load(cut_ptr + node), tl.load(tie_id_ptr + node)
            tile_end = (piece + 1) * TILE
            weight = token_weights(
                logits_ptr + node * logits_stride, overlay_ptr + node * overlay_stride, overlay_stride, ids,
                num_columns, inv_t, lse, cut, tie_id, HAS_OVERLAY, tile_end if UNALIGNED else None,
            )  # fmt: skip
            part = weight * logarithm(tl.maximum(weight, SMALLEST))
            entropy -= tl.sum(part.to(tl.float64), 0)
        tl.store(entropy_ptr + node * num_pieces + piece, entropy)


@kernel()
def walk_typical(
    logits_ptr, inv_t_ptr, lse_ptr, cut_ptr, tie_id_ptr, logits_stride, num_columns, overlay_ptr, overlay_stride,
    tokens_ptr, offsets_ptr, first_child_ptr, next_sibling_ptr, score_only_ptr, entropy_ptr, parents_ptr, marks_ptr,
    path_ptr, num_accepted_ptr, last_node_ptr, epsilon, delta, num_pieces, num_nodes, max_depth, TILE: tl.constexpr,
    HAS_SCORE_ONLY: tl.constexpr, HAS_OVERLAY: tl.constexpr,
):  # fmt: skip
    """Grid (B): the longest path of typical tokens; of several, the one whose nodes come first among siblings."""
    row = tl.program_id(0)
    path_ptr += row.to(tl.int64) * (max_depth + 1)
    root, end = row_bounds(offsets_ptr, row, num_nodes)
    target = Distributions(
        logits_ptr, inv_t_ptr, lse_ptr, cut_ptr, tie_id_ptr, logits_stride, num_columns, overlay_ptr, overlay_stride
    )
    store_parents(parents_ptr, first_child_ptr, next_sibling_ptr, root, end, TILE)
    for start in range(root, end, TILE):  # cut the links to tokens that are not typical
        node = start + tl.arange(0, TILE)
        parent = tl.load(parents_ptr + node, mask=node < end, other=-1)
        proposes = parent >= 0
        if HAS_SCORE_ONLY:
            proposes = proposes & (tl.load(score_only_ptr + node, mask=proposes, other=1) == 0)
        entropy = tl.zeros((TILE,), tl.float64)
        for piece in range(num_pieces):
            entropy += tl.load(entropy_ptr + parent.to(tl.int64) * num_pieces + piece, mask=proposes, other=0.0)
        limit = tl.minimum(tl.exp(-entropy) * delta, epsilon)
        token = tl.load(tokens_ptr + node, mask=proposes, other=-1)
        weight = tl.exp(log_weights_at(target, parent, token, proposes, HAS_OVERLAY)).to(tl.float64)
        tl.store(parents_ptr + node, tl.where(proposes & (weight > limit), parent, -1), mask=node < end)
        tl.store(marks_ptr + node, tl.zeros((TILE,), tl.int32), mask=node < end)
    tl.debug_barrier()
    longest = tl.zeros((), tl.int32)
    for start in range(root, end, TILE):
        node = start + tl.arange(0, TILE)
        top, steps = climb_to_root(parents_ptr, tl.where(node < end, node, -1), root)
        longest = tl.maximum(longest, tl.max(tl.where(top == root, steps, 0), 0))
    for start in range(root, end, TILE):
        node = start + tl.arange(0, TILE)
        top, steps = climb_to_root(parents_ptr, tl.where(node < end, node, -1), root)
        at = tl.where((top == root) & (steps == longest), node, -1)
        while tl.max(at, 0) > root:
            tl.store(marks_ptr + at, tl.full((TILE,), 1, tl.int32), mask=at > root)
            at = tl.load(parents_ptr + at, mask=at > root, other=-1)
    tl.debug_barrier()
    node = tl.where(root < end, root, -1)
    last = tl.full((), -1, tl.int32)  # Triton would not carry an alias of `node` through the loop
    length = tl.zeros((), tl.int32)
    while node >= 0:
        tl.store(path_ptr + length, node)
        last = node
        length += 1
        child = follow_link(first_child_ptr, node, end, length <= max_depth)
        node = node * 0 - 1
        while (child >= 0) & (node < 0):
            node = tl.where(tl.load(marks_ptr + child) != 0, child, -1)
            child = follow_link(next_sibling_ptr, child, end, child >= 0)
    pad_path(path_ptr, length, max_depth)
    tl.store(num_accepted_ptr + row, tl.maximum(length - 1, 0))
    tl.store(last_node_ptr + row, last)
