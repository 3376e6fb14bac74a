"""Triton kernel of tree_plan: every node walks up to its root and searches its first child and next sibling.

Shapes (int32):
    parents, depth, row, first_child, next_sibling: [num_nodes]
    offsets: [num_requests + 1]
    ancestors: [num_nodes, num_words]
"""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.jit import kernel


@kernel()
def plan_trees(
    parents_ptr, offsets_ptr, depth_ptr, row_ptr, ancestors_ptr, first_child_ptr, next_sibling_ptr, num_nodes,
    num_requests, num_words, BLOCK_W: tl.constexpr, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of BLOCK packed nodes,).

    A parent that does not precede its child ends the walk, so no loop is endless. Requests are clamped to `num_nodes`,
    whatever the offsets are.
    """
    node = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own_request = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_requests, BLOCK_B):
        request = start + tl.arange(0, BLOCK_B)
        ends = tl.load(offsets_ptr + 1 + request, mask=request < num_requests, other=2147483647)
        own_request += tl.sum((ends[None, :] <= node[:, None]).to(tl.int32), axis=1)
    has_request = (node < num_nodes) & (own_request < num_requests)
    first = tl.maximum(tl.load(offsets_ptr + own_request, mask=has_request & (own_request > 0), other=0), 0)
    end = tl.minimum(tl.load(offsets_ptr + own_request + 1, mask=has_request, other=0), num_nodes)
    parent = tl.load(parents_ptr + node, mask=has_request, other=-1)

    word = tl.arange(0, BLOCK_W)
    bits = tl.zeros([BLOCK, BLOCK_W], tl.int32)
    depth = tl.zeros([BLOCK], tl.int32) - 1
    at = tl.where(has_request, node - first, -1)
    while tl.max(at, axis=0) >= 0:
        walking = at >= 0
        bit = tl.full([BLOCK], 1, tl.int32) << (at & 31)
        bits = bits | tl.where(walking[:, None] & ((at >> 5)[:, None] == word[None, :]), bit[:, None], 0)
        depth += walking.to(tl.int32)
        parent_at = tl.load(parents_ptr + first + at, mask=walking, other=-1)
        at = tl.where(parent_at < at, parent_at, -1)

    none = 2147483647
    child = tl.full([BLOCK], none, tl.int32)
    sibling = tl.full([BLOCK], none, tl.int32)
    index = node - first
    last = tl.max(tl.where(has_request, end, 0), axis=0)
    for start in range(tl.program_id(0) * BLOCK, last, BLOCK):
        other = start + tl.arange(0, BLOCK)
        other_parent = tl.load(parents_ptr + other, mask=other < last, other=-2)
        later = (other[None, :] > node[:, None]) & (other[None, :] < end[:, None])
        is_child = later & (other_parent[None, :] == index[:, None])
        is_sibling = later & (other_parent[None, :] == parent[:, None])
        child = tl.minimum(child, tl.min(tl.where(is_child, other[None, :], none), axis=1))
        sibling = tl.minimum(sibling, tl.min(tl.where(is_sibling, other[None, :], none), axis=1))

    inside = node < num_nodes
    tl.store(depth_ptr + node, tl.maximum(depth, 0), mask=inside)
    tl.store(row_ptr + node, tl.where(has_request, own_request, -1), mask=inside)
    tl.store(first_child_ptr + node, tl.where(child == none, -1, child), mask=inside)
    tl.store(next_sibling_ptr + node, tl.where(sibling == none, -1, sibling), mask=inside)
    where = ancestors_ptr + node.to(tl.int64)[:, None] * num_words + word[None, :]
    tl.store(where, bits, mask=inside[:, None] & (word < num_words)[None, :])
