"""Triton kernel of replay_verify: which noise a node's choice is made with, found from the links of its tree."""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.jit import kernel
from ...triton_shared.tree_links import climb_to_root, row_bounds, store_parents


@kernel()
def key_nodes(
    offsets, first_child, next_sibling, seeds, positions, parents, node_seeds, node_positions, rows, nodes,
    TILE: tl.constexpr,
):  # fmt: skip
    """Seed and position of the choice after every node of one row; the last row sees to the nodes of no row too."""
    row = tl.program_id(0)
    root, end = row_bounds(offsets, row, nodes)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    store_parents(parents, first_child, next_sibling, root, end, TILE)
    stop = tl.where(row == rows - 1, nodes, end)
    for start in range(root, stop, TILE):
        node = start + tl.arange(0, TILE)
        _, steps = climb_to_root(parents, tl.where(node < end, node, -1), root)
        tl.store(node_seeds + node, seed + node.to(tl.int64) * 0, mask=node < stop)
        tl.store(node_positions + node, position + steps + 1, mask=node < stop)
