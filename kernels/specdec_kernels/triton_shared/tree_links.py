"""Links of packed trees inside Triton kernels: parents from children and siblings, and walks to the root.

A link that does not lead to a later node of its row counts as none, and rows are clamped to existing nodes. So every
loop ends and all accesses are in bounds, whatever links and offsets are.

Shapes: M = num_nodes packed nodes of B rows; offsets int32 [B + 1]; links and parents int32 [M].
"""

from __future__ import annotations

import triton
import triton.language as tl

STEPS = tl.constexpr(32)
"""Path entries that `pad_path` writes at a time."""


@triton.jit
def row_bounds(offsets_ptr, row, num_nodes):
    """Returns first node and end of a row, clamped to `num_nodes`; the first row begins at 0."""
    start = tl.minimum(tl.maximum(tl.load(offsets_ptr + row, mask=row > 0, other=0), 0), num_nodes)
    return start, tl.minimum(tl.maximum(tl.load(offsets_ptr + row + 1), start), num_nodes)


@triton.jit
def follow_link(links_ptr, node, end, wanted):
    """Returns the targets of links (first_child or next_sibling) of the wanted nodes; -1 for none."""
    to = tl.load(links_ptr + node, mask=wanted, other=-1)
    return tl.where((to > node) & (to < end), to, -1)


@triton.jit
def pad_path(path_ptr, length, max_depth):
    """Writes -1 to a path of max_depth + 1 entries, after its first `length` nodes."""
    for first in range(length, max_depth + 1, STEPS):
        step = first + tl.arange(0, STEPS)
        tl.store(path_ptr + step, tl.full((STEPS,), -1, tl.int32), mask=step <= max_depth)


@triton.jit
def store_parents(parents_ptr, first_child_ptr, next_sibling_ptr, root, end, TILE: tl.constexpr):
    """Writes the parent of every node of a row, and -1 for the root, with one program."""
    for start in range(root, end, TILE):
        node = start + tl.arange(0, TILE)
        tl.store(parents_ptr + node, tl.full((TILE,), -1, tl.int32), mask=node < end)
    tl.debug_barrier()  # other threads read or overwrite these
    for start in range(root, end, TILE):
        node = start + tl.arange(0, TILE)
        child = follow_link(first_child_ptr, node, end, node < end)
        while tl.max(child, 0) >= 0:
            tl.store(parents_ptr + child, node, mask=child >= 0)
            child = follow_link(next_sibling_ptr, child, end, child >= 0)
    tl.debug_barrier()


@triton.jit
def climb_to_root(parents_ptr, node, root):
    """Returns the last node on the way up from each node, and the number of steps; -1 and 0 for a node of -1."""
    steps = node * 0
    going = node > root
    while tl.max(going.to(tl.int32), 0) > 0:
        up = tl.load(parents_ptr + node, mask=going, other=-1)
        going = going & (up >= root)
        steps += going.to(tl.int32)
        node = tl.where(going, up, node)
        going = going & (node > root)
    return node, steps
