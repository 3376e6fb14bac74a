"""Triton kernels over ordered proposals on trees, for recursive_rejection_verify and traversal_verify.

`reject_children` takes one node with all of its children: the threshold of each child, and the residual after its
rejection, in one pass over the vocabulary per child (and one more where a proposal excludes tokens). Nodes do not wait
for one another in recursive_rejection_verify: one launch serves all. In traversal_verify a node's distribution depends
on its reach, so there is one launch per level. The walks read a few numbers per node, and `draft_sample`'s kernels draw
the next token. All kernels follow the links that `prepare_trees` leaves: no loop is endless, and no row reads or writes
nodes of another one, whatever the links were.

Shapes: M = num_nodes packed nodes of B = num_rows rows, V = vocab_size. Distributions: see `triton_shared.residual`.
    offsets_ptr int32 [B + 1]; first_child_ptr, next_sibling_ptr int32 [M], -1 for none
    accept_ptr float32 [M], threshold of a node's uniform draw
    reach_ptr float64 [M], level_ptr int32 [M] (-1: not reached yet), parents_ptr int32 [M]
    seeds_ptr int64 [B], root_positions_ptr int32 [B], uniforms_ptr float32 [M] (read if EXPLICIT_UNIFORMS)
    path_ptr int32 [B, max_depth + 1], num_accepted_ptr int32 [B]
    last_node_ptr int32 [B], first_rejected_ptr int32 [B], end of the path and its first rejected child, -1 for none
"""

from __future__ import annotations

import triton.language as tl

from ...triton_shared.jit import kernel
from ...triton_shared.random import accept_uniform
from ...triton_shared.residual import (
    DETERMINISTIC,
    WIDE,
    ResidualFlags,
    exclusions,
    pack_residual_inputs,
    proposal_weights,
    residual_weights,
)
from ...triton_shared.tree_links import follow_link, pad_path, row_bounds


@kernel(*WIDE)
def reject_children(
    logits_ptr, inv_t_ptr, lse_ptr, cut_ptr, tie_id_ptr, logits_stride, num_columns, overlay_ptr, overlay_stride,
    q_logits_ptr, q_inv_t_ptr, q_lse_ptr, q_cut_ptr, q_tie_id_ptr, q_logits_stride, q_num_columns, draft_column_ptr,
    tokens_ptr, next_sibling_ptr, proposal_kinds_ptr, dist_index_ptr, score_only_ptr, applied_ptr, p_scale_ptr,
    q_scale_ptr, offsets_ptr, first_child_ptr, accept_ptr, reach_ptr, level_ptr, parents_ptr, current_level, num_rows,
    vocab_size, residual_epsilon, TILE: tl.constexpr, LEVELS: tl.constexpr, SHORTCUT: tl.constexpr,
    IS_CHAIN: tl.constexpr, HAS_DRAFT: tl.constexpr, MAPPED: tl.constexpr, HAS_SCORE_ONLY: tl.constexpr,
    HAS_OVERLAY: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (M): all rejection rounds of one node.

    LEVELS: only if the node is at current_level; its children get their level, parent and reach. SHORTCUT: a rejection
    at a greedy node leaves the node's one token, so nothing is summed. residual_epsilon: mass of a residual that counts
    as rounding.
    """
    node = tl.program_id(0)
    wanted = node < tl.load(offsets_ptr + num_rows)
    reach = tl.full((), 1.0, tl.float64)
    if LEVELS:
        wanted = wanted & (tl.load(level_ptr + node) == current_level)
        reach = tl.load(reach_ptr + node)
    if wanted:
        inputs = pack_residual_inputs(
            logits_ptr, inv_t_ptr, lse_ptr, cut_ptr, tie_id_ptr, logits_stride, num_columns, overlay_ptr,
            overlay_stride, q_logits_ptr, q_inv_t_ptr, q_lse_ptr, q_cut_ptr, q_tie_id_ptr, q_logits_stride,
            q_num_columns, draft_column_ptr, tokens_ptr, next_sibling_ptr, proposal_kinds_ptr, dist_index_ptr,
            score_only_ptr, applied_ptr, p_scale_ptr, q_scale_ptr, vocab_size,
        )  # fmt: skip
        flags: tl.constexpr = ResidualFlags(IS_CHAIN, HAS_DRAFT, MAPPED, HAS_SCORE_ONLY, HAS_OVERLAY, UNALIGNED)
        first = tl.load(first_child_ptr + node)
        inv_t, lse = tl.load(inv_t_ptr + node), tl.load(lse_ptr + node)
        total = tl.full((), 1.0, tl.float64)
        child = first
        while child >= 0:
            proposes = child >= 0
            if HAS_SCORE_ONLY:
                proposes = tl.load(score_only_ptr + child) == 0
            if proposes:
                token = tl.load(tokens_ptr + child).to(tl.int32)
                deterministic = tl.load(proposal_kinds_ptr + child) == DETERMINISTIC
                q_token = tl.full((), 1.0, tl.float64)
                q_scale = tl.full((), 1.0, tl.float64)
                if HAS_DRAFT:  # noqa: SIM102 (known when compiling)
                    if deterministic == 0:
                        q = proposal_weights(inputs, flags, first, child, token, None)
                        anything, itself = exclusions(inputs, flags, first, child)
                        q_token = tl.where(itself, 0.0, q.to(tl.float64))
                        if anything & (q_token > 0):
                            part = tl.zeros((TILE,), tl.float64)
                            for start in range(0, vocab_size, TILE):
                                ids = start + tl.arange(0, TILE)
                                tile = proposal_weights(inputs, flags, first, child, ids, start + TILE)
                                part += tile.to(tl.float64)
                            q_scale = 1.0 / tl.sum(part, 0)
                            q_token = q_token * q_scale
                if q_token > 0:  # otherwise it was not sampled from its distribution and is no proposal
                    p_token = residual_weights(inputs, flags, node, first, child, token, None)
                    chance = tl.minimum(reach * p_token.to(tl.float64) / total / q_token, 1.0)
                    tl.store(accept_ptr + child, chance.to(tl.float32))
                    if LEVELS:
                        tl.store(reach_ptr + child, chance)
                    greedy = (inv_t == 0) & ((reach == 1.0) | (reach == 0.0))
                    if (lse == lse) & ((SHORTCUT & greedy) == 0):
                        p_scale = tl.where(deterministic, 1.0, reach / total)
                        tl.store(p_scale_ptr + child, p_scale.to(tl.float32))
                        tl.store(q_scale_ptr + child, q_scale.to(tl.float32))
                        tl.store(applied_ptr + child, 1)
                        tl.debug_barrier()  # these are read back below
                        part = tl.zeros((TILE,), tl.float64)
                        stop = tl.load(next_sibling_ptr + child)
                        for start in range(0, vocab_size, TILE):
                            ids = start + tl.arange(0, TILE)
                            rest = residual_weights(inputs, flags, node, first, stop, ids, start + TILE)
                            part += rest.to(tl.float64)
                        mass = tl.sum(part, 0)
                        share = tl.where(deterministic, reach * mass / total, mass)
                        if share > tl.where(deterministic, 0.0, residual_epsilon):
                            total = mass
                            reach = share / (share + (1.0 - reach))
                        else:  # the distribution was at most the proposal's up to rounding: it stays as it is
                            tl.debug_barrier()
                            tl.store(applied_ptr + child, 0)
                            tl.debug_barrier()
                            reach = tl.where(reach < 1, 0.0, 1.0).to(tl.float64)
                if LEVELS:
                    tl.store(level_ptr + child, current_level + 1)
                    tl.store(parents_ptr + child, node)
            child = tl.load(next_sibling_ptr + child)
        if LEVELS:
            tl.store(reach_ptr + node, reach)
            tl.store(accept_ptr + node, reach.to(tl.float32))


@kernel()
def prepare_trees(
    offsets_ptr, given_first_child_ptr, given_next_sibling_ptr, given_dist_index_ptr, first_child_ptr,
    next_sibling_ptr, dist_index_ptr, applied_ptr, level_ptr, parents_ptr, accept_ptr, reach_ptr, num_rows, num_nodes,
    num_dists, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (B + 1): links that lead onward and rows of draft distributions that exist, from the caller's.

    No rejection is applied, and roots get level 0, reach 1 and threshold 1. The last program initialises the nodes of
    no row.
    """
    row = tl.program_id(0)
    start, end = row_bounds(offsets_ptr, tl.minimum(row, num_rows - 1), num_nodes)
    if row == num_rows:
        start = tl.where(num_rows > 0, end, 0)
        end = num_nodes
    for begin in range(start, end, TILE):
        node = begin + tl.arange(0, TILE)
        inside = node < end
        linked = inside & (row < num_rows)
        root = linked & (node == start)
        tl.store(first_child_ptr + node, follow_link(given_first_child_ptr, node, end, linked), mask=inside)
        tl.store(next_sibling_ptr + node, follow_link(given_next_sibling_ptr, node, end, linked), mask=inside)
        dist = tl.load(given_dist_index_ptr + node, mask=linked, other=0)
        tl.store(dist_index_ptr + node, tl.minimum(tl.maximum(dist, 0), num_dists - 1), mask=inside)
        tl.store(applied_ptr + node, tl.zeros((TILE,), tl.int32), mask=inside)
        tl.store(level_ptr + node, tl.where(root, 0, -1), mask=inside)
        tl.store(parents_ptr + node, tl.full((TILE,), -1, tl.int32), mask=inside)
        tl.store(accept_ptr + node, tl.where(root, 1.0, 0.0), mask=inside)
        tl.store(reach_ptr + node, tl.where(root, 1.0, 0.0).to(tl.float64), mask=inside)


@kernel()
def walk_down(
    offsets_ptr, first_child_ptr, next_sibling_ptr, score_only_ptr, accept_ptr, seeds_ptr, root_positions_ptr,
    uniforms_ptr, path_ptr, num_accepted_ptr, last_node_ptr, first_rejected_ptr, num_nodes, max_depth,
    EXPLICIT_UNIFORMS: tl.constexpr, HAS_SCORE_ONLY: tl.constexpr,
):  # fmt: skip
    """Grid (B): the walk of recursive_rejection_verify, at every node to the first child that is accepted.

    Where the path is full, its last node counts as a leaf: none of its children was rejected.
    """
    row = tl.program_id(0)
    path_ptr += row.to(tl.int64) * (max_depth + 1)
    root, end = row_bounds(offsets_ptr, row, num_nodes)
    node = tl.where(root < end, root, -1)
    last = tl.full((), -1, tl.int32)  # Triton would not carry an alias of `node` through the loop
    length = tl.zeros((), tl.int32)
    if node >= 0:
        seed, position = tl.load(seeds_ptr + row), tl.load(root_positions_ptr + row)
        while node >= 0:
            tl.store(path_ptr + length, node)
            last = node
            length += 1
            child = tl.load(first_child_ptr + node)
            node = node * 0 - 1
            while (child >= 0) & (node < 0) & (length <= max_depth):
                if EXPLICIT_UNIFORMS:
                    u = tl.load(uniforms_ptr + child)
                else:
                    u = accept_uniform(seed, position, child - root)
                passed = u < tl.load(accept_ptr + child)
                if HAS_SCORE_ONLY:
                    passed = passed & (tl.load(score_only_ptr + child) == 0)
                node = tl.where(passed, child, -1)
                child = tl.load(next_sibling_ptr + child)
    pad_path(path_ptr, length, max_depth)
    tl.store(num_accepted_ptr + row, tl.maximum(length - 1, 0))
    tl.store(last_node_ptr + row, last)
    first = tl.full((), -1, tl.int32)
    if (last >= 0) & (length <= max_depth):
        first = tl.load(first_child_ptr + last)
    tl.store(first_rejected_ptr + row, first)
