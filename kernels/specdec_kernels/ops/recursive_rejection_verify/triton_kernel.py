"""Triton kernels over ordered proposals on trees, for recursive_rejection_verify and traversal_verify.

`weigh` is one node with all of its children: what each may be accepted with, and what its refusal leaves, in one pass
over the vocabulary per refusal (and one more where its distribution excludes tokens). Nodes do not wait for one
another: recursive_rejection_verify weighs all of them in one launch, traversal_verify one level per launch, since a
node's distribution depends on what reached it. The walks read a few numbers per node; `draft_sample`'s kernels draw
at the end. All of them follow the links that `prepare` leaves, so that no loop is endless and no row reads or writes
another one's nodes, whatever the links were.
"""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.jit import kernel
from ...triton_shared.random import accept_uniform
from ...triton_shared.residual import DETERMINISTIC, WIDE, exclusions, proposal_weights, residual_weights
from ...triton_shared.tree_links import follow_link, pad_path, row_bounds


@kernel(*WIDE)
def weigh(
    logits, inv_t, lse, cut, tie_id, stride, width, cells, room, q_logits, q_inv_t, q_lse, q_cut, q_tie, q_stride,
    q_width, columns, tokens, next_sibling, proposal_kinds, dist_index, score_only, applied, p_scale, q_scale, offsets,
    first_child, accept, reach, level, parents, level_now, rows, vocab, dust, TILE: tl.constexpr, LEVELS: tl.constexpr,
    SHORTCUT: tl.constexpr, CHAIN: tl.constexpr, DRAFT: tl.constexpr, MAPPED: tl.constexpr, SCORE_ONLY: tl.constexpr,
    FOLD: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Rounds of one node. LEVELS: only if it is at level_now; its children get their level, parent and reach.

    SHORTCUT: what is refused at a greedy node leaves the node's one token, whatever it was, so nothing is summed.
    """
    node = tl.program_id(0)
    mine = node < tl.load(offsets + rows)
    own = tl.full((), 1.0, tl.float64)
    if LEVELS:
        mine = mine & (tl.load(level + node) == level_now)
        own = tl.load(reach + node)
    if mine:
        target = (logits, inv_t, lse, cut, tie_id, stride, width, cells, room)
        draft = (q_logits, q_inv_t, q_lse, q_cut, q_tie, q_stride, q_width)
        tree = (tokens, next_sibling, proposal_kinds, dist_index, score_only)
        steps = (applied, p_scale, q_scale)
        kind: tl.constexpr = (CHAIN, DRAFT, MAPPED, SCORE_ONLY, FOLD, UNALIGNED)
        first = tl.load(first_child + node)
        scale, norm = tl.load(inv_t + node), tl.load(lse + node)
        total = tl.full((), 1.0, tl.float64)
        child = first
        while child >= 0:
            proposes = child >= 0
            if SCORE_ONLY:
                proposes = tl.load(score_only + child) == 0
            if proposes:
                token = tl.load(tokens + child).to(tl.int32)
                chosen = tl.load(proposal_kinds + child) == DETERMINISTIC
                offered = tl.full((), 1.0, tl.float64)
                factor = tl.full((), 1.0, tl.float64)
                if DRAFT:  # noqa: SIM102 (known when compiling)
                    if chosen == 0:
                        q = proposal_weights(tree, draft, columns, kind, first, child, token, vocab, None)
                        something, itself = exclusions(tree, kind, first, child)
                        offered = tl.where(itself, 0.0, q.to(tl.float64))
                        if something & (offered > 0):
                            part = tl.zeros((TILE,), tl.float64)
                            for start in range(0, vocab, TILE):
                                tile = proposal_weights(
                                    tree, draft, columns, kind, first, child, start + tl.arange(0, TILE), vocab,
                                    start + TILE,
                                )  # fmt: skip
                                part += tile.to(tl.float64)
                            factor = 1.0 / tl.sum(part, 0)
                            offered = offered * factor
                if offered > 0:  # otherwise it was not drawn from its distribution and is no proposal
                    held = residual_weights(
                        target, tree, draft, columns, steps, kind, node, first, child, token, vocab, None
                    )
                    chance = tl.minimum(own * held.to(tl.float64) / total / offered, 1.0)
                    tl.store(accept + child, chance.to(tl.float32))
                    if LEVELS:
                        tl.store(reach + child, chance)
                    greedy = (scale == 0) & ((own == 1.0) | (own == 0.0))
                    if (norm == norm) & ((SHORTCUT & greedy) == 0):
                        by = tl.where(chosen, 1.0, own / total)
                        tl.store(p_scale + child, by.to(tl.float32))
                        tl.store(q_scale + child, factor.to(tl.float32))
                        tl.store(applied + child, 1)
                        tl.debug_barrier()  # these are read back below
                        part = tl.zeros((TILE,), tl.float64)
                        stop = tl.load(next_sibling + child)
                        for start in range(0, vocab, TILE):
                            left = residual_weights(
                                target, tree, draft, columns, steps, kind, node, first, stop,
                                start + tl.arange(0, TILE), vocab, start + TILE,
                            )  # fmt: skip
                            part += left.to(tl.float64)
                        left_mass = tl.sum(part, 0)
                        share = tl.where(chosen, own * left_mass / total, left_mass)
                        if share > tl.where(chosen, 0.0, dust):
                            total = left_mass
                            own = share / (share + (1.0 - own))
                        else:  # the distribution was at most the proposal's up to rounding: it stays as it is
                            tl.debug_barrier()
                            tl.store(applied + child, 0)
                            tl.debug_barrier()
                            own = tl.where(own < 1, 0.0, 1.0).to(tl.float64)
                if LEVELS:
                    tl.store(level + child, level_now + 1)
                    tl.store(parents + child, node)
            child = tl.load(next_sibling + child)
        if LEVELS:
            tl.store(reach + node, own)
            tl.store(accept + node, own.to(tl.float32))


@kernel()
def prepare(
    offsets, first_child, next_sibling, dist_index, first, sibling, source, applied, level, parents, accept, reach,
    rows,
    nodes, dists, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (rows + 1): links that lead onward and rows of draft distributions that exist, nobody refused, and roots
    of level 0, reach and threshold 1. The last program sees to the nodes of no row."""
    row = tl.program_id(0)
    start, end = row_bounds(offsets, tl.minimum(row, rows - 1), nodes)
    if row == rows:
        start = tl.where(rows > 0, end, 0)
        end = nodes
    for begin in range(start, end, TILE):
        node = begin + tl.arange(0, TILE)
        inside = node < end
        linked = inside & (row < rows)
        root = linked & (node == start)
        tl.store(first + node, follow_link(first_child, node, end, linked), mask=inside)
        tl.store(sibling + node, follow_link(next_sibling, node, end, linked), mask=inside)
        dist = tl.load(dist_index + node, mask=linked, other=0)
        tl.store(source + node, tl.minimum(tl.maximum(dist, 0), dists - 1), mask=inside)
        tl.store(applied + node, tl.zeros((TILE,), tl.int32), mask=inside)
        tl.store(level + node, tl.where(root, 0, -1), mask=inside)
        tl.store(parents + node, tl.full((TILE,), -1, tl.int32), mask=inside)
        tl.store(accept + node, tl.where(root, 1.0, 0.0), mask=inside)
        tl.store(reach + node, tl.where(root, 1.0, 0.0).to(tl.float64), mask=inside)


@kernel()
def walk_down(
    offsets, first_child, next_sibling, score_only, accept, seeds, positions, uniforms, path, accepted, last, firsts,
    nodes,
    depth, EXPLICIT: tl.constexpr, SCORE_ONLY: tl.constexpr,
):  # fmt: skip
    """recursive_rejection_verify: at every node the first child whose coin passes. Where the path is full its last
    node counts as a leaf: nobody has refused its children."""
    row = tl.program_id(0)
    out = path + row.to(tl.int64) * (depth + 1)
    root, end = row_bounds(offsets, row, nodes)
    node = tl.where(root < end, root, -1)
    final = node
    length = tl.zeros((), tl.int32)
    if node >= 0:
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        while node >= 0:
            tl.store(out + length, node)
            final = node
            length += 1
            child = tl.load(first_child + node)
            node = node * 0 - 1
            while (child >= 0) & (node < 0) & (length <= depth):
                if EXPLICIT:
                    u = tl.load(uniforms + child)
                else:
                    u = accept_uniform(seed, position, child - root)
                passed = u < tl.load(accept + child)
                if SCORE_ONLY:
                    passed = passed & (tl.load(score_only + child) == 0)
                node = tl.where(passed, child, -1)
                child = tl.load(next_sibling + child)
    pad_path(out, length, depth)
    tl.store(accepted + row, tl.maximum(length - 1, 0))
    tl.store(last + row, final)
    first = tl.full((), -1, tl.int32)
    if (final >= 0) & (length <= depth):
        first = tl.load(first_child + final)
    tl.store(firsts + row, first)
