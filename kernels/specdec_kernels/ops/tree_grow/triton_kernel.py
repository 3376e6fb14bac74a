"""Triton kernels of tree_grow: what a level grows from, its columns and marks, and the packed trees."""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.distribution import NEGATIVE_INFINITY
from ...triton_shared.jit import kernel
from ...triton_shared.tree_links import row_bounds


@kernel()
def front(
    offsets, scores, seeds, positions, own, node_seeds, node_positions, count, columns, keep, level,
    NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (trees): scores, seeds and positions of the nodes that a tree grows from, of `count` in all."""
    tree = tl.program_id(0)
    first, end = row_bounds(offsets, tree, count)
    block = tl.where(level == 0, 0, 1 + (level - 1) * keep)
    for start in range(first, end, BLOCK):
        node = start + tl.arange(0, BLOCK)
        column = block + node - first
        inside = node < end
        value = tl.load(scores + tree.to(tl.int64) * columns + column, mask=inside, other=NEGATIVE_INFINITY)
        tl.store(own + node, value, mask=inside)
        if NOISE:
            position = tl.load(positions + tree)
            position = tl.where(position < 0, -1, position + level + 1)
            tl.store(node_seeds + node, tl.load(seeds + tree) + node.to(tl.int64) * 0, mask=inside)
            tl.store(node_positions + node, position + node * 0, mask=inside)


@kernel()
def enter(
    offsets, children, found, best, limits, tokens, scores, parents, nodes, counts, growing, columns, keep, level,
    width, reach, LAST: tl.constexpr, KEEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (trees): the best children of a tree become columns; the nodes that go on, or those of the end, get their
    places. KEEP, COLUMNS: room for that many."""
    tree = tl.program_id(0)
    start, block = tree.to(tl.int64) * columns, 1 + level * keep
    ahead = tl.where(level == 0, 0, block - keep)
    place = tl.arange(0, KEEP)
    child = tl.load(best + tree.to(tl.int64) * keep + place, mask=place < keep, other=-1)
    there = child >= 0
    own = tl.load(found + child, mask=there, other=NEGATIVE_INFINITY)
    entered = place < keep
    tl.store(tokens + start + block + place, tl.load(children + child, mask=there, other=-1), mask=entered)
    tl.store(scores + start + block + place, own, mask=entered)
    first, _ = row_bounds(offsets, tree, growing)
    above = ahead + child // width - first
    tl.store(parents + start + block + place, tl.where(there, above, -1), mask=entered)
    tl.debug_barrier()
    column = tl.arange(0, COLUMNS)
    inside, limit = column < columns, tl.load(limits + tree)
    value = tl.load(scores + start + column, mask=inside & (column > 0), other=NEGATIVE_INFINITY)
    mark = tl.load(nodes + start + column, mask=inside, other=-1)
    alive = value > NEGATIVE_INFINITY
    if LAST:
        order = tl.zeros((COLUMNS,), dtype=tl.int32)
        for other in range(1, columns):
            rival = tl.load(scores + start + other)
            order += ((rival > value) | ((rival == value) & (other < column))).to(tl.int32)
        chosen = (alive & (order < limit)) | (column == 0)
        count = tl.sum(chosen.to(tl.int32), 0)
        tl.store(nodes + start + column, tl.where(chosen, tl.cumsum(chosen.to(tl.int32), 0) - 1, -1), mask=inside)
    else:
        before = tl.sum((mark >= 0).to(tl.int32), 0)
        count = before
        tl.debug_barrier()  # marks are read before they are written
        for slot in range(reach):
            mine = tl.load(scores + start + block + slot)
            as_good = tl.sum((alive & (value >= mine)).to(tl.int32), 0)
            if (mine > NEGATIVE_INFINITY) & (as_good < limit):
                tl.store(nodes + start + block + slot, count)
                count += 1
        count = tl.where(count > before, count, 0)
    tl.store(counts + tree, count)


@kernel()
def pack(
    tokens, parents, nodes, counts, packed, links, bounds, trees, columns, keep, most,
    COLUMNS: tl.constexpr, TREES: tl.constexpr,
):  # fmt: skip
    """Grid (trees): the marked nodes of a tree behind those of the trees before it, where it ends, and the depth of its
    deepest."""
    tree = tl.program_id(0)
    other = tl.arange(0, TREES)
    start, end = tree.to(tl.int64) * columns, tl.sum(tl.load(counts + other, mask=other < tree, other=0), 0)
    column = tl.arange(0, COLUMNS)
    count = tl.load(counts + tree)
    node = tl.load(nodes + start + column, mask=(column < columns) & (count > 0), other=-1)
    marked = (node >= 0) & (node < trees * most - end)
    above = tl.load(parents + start + column, mask=marked, other=-1)
    link = tl.load(nodes + start + above, mask=marked & (above >= 0) & (above < columns), other=-1)
    tl.store(packed + end + node, tl.load(tokens + start + column, mask=marked, other=0), mask=marked)
    tl.store(links + end + node, link, mask=marked)
    deepest = tl.max(tl.where(marked, column, 0), 0)
    tl.store(counts + trees + tree, (deepest + keep - 1) // keep)
    tl.store(bounds, end, mask=tree == 0)
    tl.store(bounds + tree + 1, end + count)
