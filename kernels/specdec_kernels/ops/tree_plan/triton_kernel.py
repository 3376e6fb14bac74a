"""Triton kernel of tree_plan: every node walks up to its root and looks ahead for its first child and next sibling."""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.jit import kernel


@kernel()
def plan(
    parents, offsets, depth, row, ancestors, first_child, next_sibling, nodes, batch, words,
    BLOCK_W: tl.constexpr, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of packed nodes). A parent that does not precede its child ends the walk: nothing hangs. Rows lie
    within `nodes`, whatever the offsets are."""
    node = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = tl.arange(0, BLOCK_B)
    ends = tl.load(offsets + 1 + request, mask=request < batch, other=2147483647)
    mine = tl.sum((ends[None, :] <= node[:, None]).to(tl.int32), axis=1)
    held = (node < nodes) & (mine < batch)
    first = tl.maximum(tl.load(offsets + mine, mask=held & (mine > 0), other=0), 0)
    end = tl.minimum(tl.load(offsets + mine + 1, mask=held, other=0), nodes)
    parent = tl.load(parents + node, mask=held, other=-1)

    word = tl.arange(0, BLOCK_W)
    bits = tl.zeros([BLOCK, BLOCK_W], tl.int32)
    deep = tl.zeros([BLOCK], tl.int32) - 1
    at = tl.where(held, node - first, -1)
    while tl.max(at, axis=0) >= 0:
        here = at >= 0
        bit = tl.full([BLOCK], 1, tl.int32) << (at & 31)
        bits = bits | tl.where(here[:, None] & ((at >> 5)[:, None] == word[None, :]), bit[:, None], 0)
        deep += here.to(tl.int32)
        above = tl.load(parents + first + at, mask=here, other=-1)
        at = tl.where(above < at, above, -1)

    nobody = 2147483647
    child = tl.full([BLOCK], nobody, tl.int32)
    sibling = tl.full([BLOCK], nobody, tl.int32)
    local = node - first
    last = tl.max(tl.where(held, end, 0), axis=0)
    for start in range(tl.program_id(0) * BLOCK, last, BLOCK):
        other = start + tl.arange(0, BLOCK)
        theirs = tl.load(parents + other, mask=other < last, other=-2)
        later = (other[None, :] > node[:, None]) & (other[None, :] < end[:, None])
        below = later & (theirs[None, :] == local[:, None])
        beside = later & (theirs[None, :] == parent[:, None])
        child = tl.minimum(child, tl.min(tl.where(below, other[None, :], nobody), axis=1))
        sibling = tl.minimum(sibling, tl.min(tl.where(beside, other[None, :], nobody), axis=1))

    inside = node < nodes
    tl.store(depth + node, tl.maximum(deep, 0), mask=inside)
    tl.store(row + node, tl.where(held, mine, -1), mask=inside)
    tl.store(first_child + node, tl.where(child == nobody, -1, child), mask=inside)
    tl.store(next_sibling + node, tl.where(sibling == nobody, -1, sibling), mask=inside)
    where = ancestors + node.to(tl.int64)[:, None] * words + word[None, :]
    tl.store(where, bits, mask=inside[:, None] & (word < words)[None, :])
