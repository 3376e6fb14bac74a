"""Links of packed trees inside Triton kernels: parents from children and siblings, and the way up.

A link that does not lead to a later node of its row ends there, and rows lie within the nodes that there are, so that
no loop is endless and nothing outside of them is read or written, whatever links and offsets are.
"""

from __future__ import annotations

import triton
import triton.language as tl

STEPS = tl.constexpr(32)
"""Places of a path that `end_path` writes at a time."""


@triton.jit
def row_bounds(offsets, row, nodes):
    """First node of a row and the one behind its last, both within `nodes`; the first row begins at 0."""
    start = tl.minimum(tl.maximum(tl.load(offsets + row, mask=row > 0, other=0), 0), nodes)
    return start, tl.minimum(tl.maximum(tl.load(offsets + row + 1), start), nodes)


@triton.jit
def follow_link(links, node, end, wanted):
    """Where links (first_child or next_sibling) lead from the wanted nodes; -1 for nowhere."""
    to = tl.load(links + node, mask=wanted, other=-1)
    return tl.where((to > node) & (to < end), to, -1)


@triton.jit
def pad_path(out, length, depth):
    """Writes -1 behind the first `length` nodes of a path, up to the last of its depth + 1 places."""
    for first in range(length, depth + 1, STEPS):
        step = first + tl.arange(0, STEPS)
        tl.store(out + step, tl.full((STEPS,), -1, tl.int32), mask=step <= depth)


@triton.jit
def store_parents(parents, first_child, next_sibling, root, end, TILE: tl.constexpr):
    """Writes the parent of every node of a row, -1 for the root, with one program."""
    for start in range(root, end, TILE):
        node = start + tl.arange(0, TILE)
        tl.store(parents + node, tl.full((TILE,), -1, tl.int32), mask=node < end)
    tl.debug_barrier()  # what one thread writes, others read or overwrite
    for start in range(root, end, TILE):
        node = start + tl.arange(0, TILE)
        child = follow_link(first_child, node, end, node < end)
        while tl.max(child, 0) >= 0:
            tl.store(parents + child, node, mask=child >= 0)
            child = follow_link(next_sibling, child, end, child >= 0)
    tl.debug_barrier()


@triton.jit
def climb_to_root(parents, node, root):
    """(where the way up from nodes of a row ends, how many steps it takes); -1 and 0 for a node of -1."""
    steps = node * 0
    going = node > root
    while tl.max(going.to(tl.int32), 0) > 0:
        up = tl.load(parents + node, mask=going, other=-1)
        going = going & (up >= root)
        steps += going.to(tl.int32)
        node = tl.where(going, up, node)
        going = going & (node > root)
    return node, steps
