"""Triton kernel of traversal_verify's walk; the nodes are weighed by recursive_rejection_verify's kernel, level by
level.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.jit import kernel
from ...triton_shared.random import accept_uniform
from ...triton_shared.tree_links import pad_path, row_bounds


@kernel()
def walk_up(
    offsets, first_child, next_sibling, score_only, accept, level, parents, seeds, positions, uniforms, path, accepted,
    last, firsts, nodes, depth, EXPLICIT: tl.constexpr, SCORE_ONLY: tl.constexpr,
):  # fmt: skip
    """traversal_verify: the first node in post-order whose coin passes; the root's always does.

    A tree is left after two steps per node; other links, which may lead in circles, then end the walk where it is."""
    row = tl.program_id(0)
    out = path + row.to(tl.int64) * (depth + 1)
    root, end = row_bounds(offsets, row, nodes)
    final = tl.full((), -1, tl.int32)
    length = tl.zeros((), tl.int32)
    if root < end:
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        node = root
        descend = node >= 0
        steps = 2 * (end - root)
        while final < 0:
            steps -= 1
            child = tl.full((), -1, tl.int32)
            if descend:
                child = proposing(tl.load(first_child + node), next_sibling, score_only, SCORE_ONLY)
                if (child >= 0) & (tl.load(level + node) >= depth):
                    child = child * 0 - 1
            if child >= 0:
                node = child
            else:
                if EXPLICIT:
                    u = tl.load(uniforms + node)
                else:
                    u = accept_uniform(seed, position, node - root)
                if (node == root) | (u < tl.load(accept + node)) | (steps < 0):
                    final = node
                else:
                    sibling = proposing(tl.load(next_sibling + node), next_sibling, score_only, SCORE_ONLY)
                    descend = sibling >= 0
                    above = tl.load(parents + node, mask=node != root, other=0)
                    node = tl.where(descend, sibling, tl.maximum(above, root))
        length = tl.load(level + final) + 1
        node = final
        for back in range(length):
            tl.store(out + (length - 1 - back), node)
            node = tl.load(parents + node, mask=node > root, other=-1)
    pad_path(out, length, depth)
    tl.store(accepted + row, tl.maximum(length - 1, 0))
    tl.store(last + row, final)
    first = tl.full((), -1, tl.int32)
    if final >= 0:
        first = tl.load(first_child + final)
    tl.store(firsts + row, first)


@triton.jit
def proposing(child, next_sibling, score_only, SCORE_ONLY: tl.constexpr):
    """This sibling, or the next one that is no score-only node; -1 for none."""
    if SCORE_ONLY:
        while (child >= 0) & (tl.load(score_only + child, mask=child >= 0, other=0) != 0):
            child = tl.load(next_sibling + child)
    return child
