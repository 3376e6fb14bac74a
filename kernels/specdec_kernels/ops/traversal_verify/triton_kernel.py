"""Triton kernel of traversal_verify's walk. recursive_rejection_verify's kernel computes the reach, level by level.

Shapes: as in `recursive_rejection_verify.triton_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.jit import kernel
from ...triton_shared.random import accept_uniform
from ...triton_shared.tree_links import pad_path, row_bounds


@kernel()
def walk_up(
    offsets_ptr, first_child_ptr, next_sibling_ptr, score_only_ptr, accept_ptr, level_ptr, parents_ptr, seeds_ptr,
    root_positions_ptr, uniforms_ptr, path_ptr, num_accepted_ptr, last_node_ptr, first_rejected_ptr, num_nodes,
    max_depth, EXPLICIT_UNIFORMS: tl.constexpr, HAS_SCORE_ONLY: tl.constexpr,
):  # fmt: skip
    """Grid (B): the first node in post-order that is accepted; the root always is.

    A walk over a tree takes two steps per node at most. Other links may lead in circles: they end the walk there.
    """
    row = tl.program_id(0)
    path_ptr += row.to(tl.int64) * (max_depth + 1)
    root, end = row_bounds(offsets_ptr, row, num_nodes)
    last = tl.full((), -1, tl.int32)
    length = tl.zeros((), tl.int32)
    if root < end:
        seed, position = tl.load(seeds_ptr + row), tl.load(root_positions_ptr + row)
        node = root
        descend = node >= 0
        steps_left = 2 * (end - root)
        while last < 0:
            steps_left -= 1
            child = tl.full((), -1, tl.int32)
            if descend:
                first = tl.load(first_child_ptr + node)
                child = next_proposal(first, next_sibling_ptr, score_only_ptr, HAS_SCORE_ONLY)
                if (child >= 0) & (tl.load(level_ptr + node) >= max_depth):
                    child = child * 0 - 1
            if child >= 0:
                node = child
            else:
                if EXPLICIT_UNIFORMS:
                    u = tl.load(uniforms_ptr + node)
                else:
                    u = accept_uniform(seed, position, node - root)
                if (node == root) | (u < tl.load(accept_ptr + node)) | (steps_left < 0):
                    last = node
                else:
                    following = tl.load(next_sibling_ptr + node)
                    sibling = next_proposal(following, next_sibling_ptr, score_only_ptr, HAS_SCORE_ONLY)
                    descend = sibling >= 0
                    above = tl.load(parents_ptr + node, mask=node != root, other=0)
                    node = tl.where(descend, sibling, tl.maximum(above, root))
        length = tl.load(level_ptr + last) + 1
        node = last
        for back in range(length):
            tl.store(path_ptr + (length - 1 - back), node)
            node = tl.load(parents_ptr + node, mask=node > root, other=-1)
    pad_path(path_ptr, length, max_depth)
    tl.store(num_accepted_ptr + row, tl.maximum(length - 1, 0))
    tl.store(last_node_ptr + row, last)
    first_rejected = tl.full((), -1, tl.int32)
    if last >= 0:
        first_rejected = tl.load(first_child_ptr + last)
    tl.store(first_rejected_ptr + row, first_rejected)


@triton.jit
def next_proposal(child, next_sibling_ptr, score_only_ptr, HAS_SCORE_ONLY: tl.constexpr):
    """This sibling, or the next one that is no score-only node; -1 for none."""
    if HAS_SCORE_ONLY:
        while (child >= 0) & (tl.load(score_only_ptr + child, mask=child >= 0, other=0) != 0):
            child = tl.load(next_sibling_ptr + child)
    return child
