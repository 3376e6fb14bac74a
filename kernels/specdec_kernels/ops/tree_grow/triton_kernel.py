"""Triton kernels of tree_grow: the nodes that a level expands, the columns and nodes of the level, and packed trees.

Shapes: B = num_trees, C = num_columns, N = num_expanded nodes, M = B * most packed nodes.
    offsets: int32 [B + 1], first expanded node of each tree
    tokens, scores, parents, nodes: [B, C], the columns of `Growth`; limits: int32 [B]
    seeds, positions: [B]; expanded_scores, expanded_seeds, expanded_positions: [N]
    children: int64 [N, width]; child_scores: float32 [N, width]; best: int32 [B, keep]
    counts: int32 [2, B], nodes and depth of each tree
    packed_tokens: int64 [M]; packed_parents: int32 [M]; bounds: int32 [B + 1], first packed node of each tree
"""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.distribution import NEGATIVE_INFINITY
from ...triton_shared.jit import kernel
from ...triton_shared.tree_links import row_bounds


@kernel()
def front(
    offsets_ptr, scores_ptr, seeds_ptr, positions_ptr, expanded_scores_ptr, expanded_seeds_ptr, expanded_positions_ptr,
    num_expanded, num_columns, keep, level, NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (trees,). Copies score, seed and child position of every node that a tree expands on this level."""
    tree = tl.program_id(0)
    first, end = row_bounds(offsets_ptr, tree, num_expanded)
    first_column = tl.where(level == 0, 0, 1 + (level - 1) * keep)
    for start in range(first, end, BLOCK):
        node = start + tl.arange(0, BLOCK)
        column = first_column + node - first
        inside = node < end
        score_at = scores_ptr + tree.to(tl.int64) * num_columns + column
        tl.store(expanded_scores_ptr + node, tl.load(score_at, mask=inside, other=NEGATIVE_INFINITY), mask=inside)
        if NOISE:
            position = tl.load(positions_ptr + tree)
            position = tl.where(position < 0, -1, position + level + 1)
            tl.store(expanded_seeds_ptr + node, tl.load(seeds_ptr + tree) + node.to(tl.int64) * 0, mask=inside)
            tl.store(expanded_positions_ptr + node, position + node * 0, mask=inside)


@kernel()
def enter(
    offsets_ptr, children_ptr, child_scores_ptr, best_ptr, limits_ptr, tokens_ptr, scores_ptr, parents_ptr, nodes_ptr,
    counts_ptr, num_expanded, num_columns, keep, level, width, reach, LAST: tl.constexpr, KEEP: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: (trees,). Writes the best children of a tree to the level's columns, and numbers nodes.

    Before the last level it numbers the nodes that the next level expands, at most `reach`. After the last level
    it numbers the nodes of the final tree. KEEP, COLUMNS: lanes for `keep` children and `num_columns` columns.
    """
    tree = tl.program_id(0)
    row, first_column = tree.to(tl.int64) * num_columns, 1 + level * keep
    parent_column = tl.where(level == 0, 0, first_column - keep)
    place = tl.arange(0, KEEP)
    child = tl.load(best_ptr + tree.to(tl.int64) * keep + place, mask=place < keep, other=-1)
    exists = child >= 0
    child_score = tl.load(child_scores_ptr + child, mask=exists, other=NEGATIVE_INFINITY)
    written = place < keep
    token = tl.load(children_ptr + child, mask=exists, other=-1)
    tl.store(tokens_ptr + row + first_column + place, token, mask=written)
    tl.store(scores_ptr + row + first_column + place, child_score, mask=written)
    first, _ = row_bounds(offsets_ptr, tree, num_expanded)
    parent = parent_column + child // width - first
    tl.store(parents_ptr + row + first_column + place, tl.where(exists, parent, -1), mask=written)
    tl.debug_barrier()
    column = tl.arange(0, COLUMNS)
    inside, limit = column < num_columns, tl.load(limits_ptr + tree)
    score = tl.load(scores_ptr + row + column, mask=inside & (column > 0), other=NEGATIVE_INFINITY)
    node = tl.load(nodes_ptr + row + column, mask=inside, other=-1)
    has_token = score > NEGATIVE_INFINITY
    if LAST:
        rank = tl.zeros((COLUMNS,), dtype=tl.int32)
        for other in range(1, num_columns):
            other_score = tl.load(scores_ptr + row + other)
            rank += ((other_score > score) | ((other_score == score) & (other < column))).to(tl.int32)
        selected = (has_token & (rank < limit)) | (column == 0)
        count = tl.sum(selected.to(tl.int32), 0)
        number = tl.where(selected, tl.cumsum(selected.to(tl.int32), 0) - 1, -1)
        tl.store(nodes_ptr + row + column, number, mask=inside)
    else:
        before = tl.sum((node >= 0).to(tl.int32), 0)
        count = before
        tl.debug_barrier()  # `nodes` is read before it is written
        for slot in range(reach):
            own_score = tl.load(scores_ptr + row + first_column + slot)
            as_good = tl.sum((has_token & (score >= own_score)).to(tl.int32), 0)
            if (own_score > NEGATIVE_INFINITY) & (as_good < limit):
                tl.store(nodes_ptr + row + first_column + slot, count)
                count += 1
        count = tl.where(count > before, count, 0)
    tl.store(counts_ptr + tree, count)


@kernel()
def pack(
    tokens_ptr, parents_ptr, nodes_ptr, counts_ptr, packed_tokens_ptr, packed_parents_ptr, bounds_ptr, num_trees,
    num_columns, keep, most, COLUMNS: tl.constexpr, TREES: tl.constexpr,
):  # fmt: skip
    """Grid: (trees,). Packs the numbered nodes of a tree behind those of earlier trees; stores its bounds and depth.

    COLUMNS, TREES: lanes for `num_columns` columns and `num_trees` trees.
    """
    tree = tl.program_id(0)
    other = tl.arange(0, TREES)
    row, first = tree.to(tl.int64) * num_columns, tl.sum(tl.load(counts_ptr + other, mask=other < tree, other=0), 0)
    column = tl.arange(0, COLUMNS)
    count = tl.load(counts_ptr + tree)
    node = tl.load(nodes_ptr + row + column, mask=(column < num_columns) & (count > 0), other=-1)
    packed = (node >= 0) & (node < num_trees * most - first)
    parent = tl.load(parents_ptr + row + column, mask=packed, other=-1)
    has_parent = packed & (parent >= 0) & (parent < num_columns)
    parent_node = tl.load(nodes_ptr + row + parent, mask=has_parent, other=-1)
    tl.store(packed_tokens_ptr + first + node, tl.load(tokens_ptr + row + column, mask=packed, other=0), mask=packed)
    tl.store(packed_parents_ptr + first + node, parent_node, mask=packed)
    deepest = tl.max(tl.where(packed, column, 0), 0)
    tl.store(counts_ptr + num_trees + tree, (deepest + keep - 1) // keep)
    tl.store(bounds_ptr, first, mask=tree == 0)
    tl.store(bounds_ptr + tree + 1, first + count)
