"""Triton kernel of replay_verify: keys of the noise of every node's choice, from the links of its tree.

Shapes: M = num_nodes packed nodes of B = num_rows rows.
    offsets_ptr int32 [B + 1], first_child_ptr and next_sibling_ptr int32 [M]
    seeds_ptr int64 [B], root_positions_ptr int32 [B]
    parents_ptr int32 [M], node_seeds_ptr int64 [M], node_positions_ptr int32 [M]
"""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.jit import kernel
from ...triton_shared.tree_links import climb_to_root, row_bounds, store_parents


@kernel()
def key_nodes(
    offsets_ptr, first_child_ptr, next_sibling_ptr, seeds_ptr, root_positions_ptr, parents_ptr, node_seeds_ptr,
    node_positions_ptr, num_rows, num_nodes, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (B): seed and position of the choice after every node of one row; the last row takes the tail nodes too."""
    row = tl.program_id(0)
    root, end = row_bounds(offsets_ptr, row, num_nodes)
    seed, position = tl.load(seeds_ptr + row), tl.load(root_positions_ptr + row)
    store_parents(parents_ptr, first_child_ptr, next_sibling_ptr, root, end, TILE)
    stop = tl.where(row == num_rows - 1, num_nodes, end)
    for start in range(root, stop, TILE):
        node = start + tl.arange(0, TILE)
        _, steps = climb_to_root(parents_ptr, tl.where(node < end, node, -1), root)
        tl.store(node_seeds_ptr + node, seed + node.to(tl.int64) * 0, mask=node < stop)
        tl.store(node_positions_ptr + node, position + steps + 1, mask=node < stop)
