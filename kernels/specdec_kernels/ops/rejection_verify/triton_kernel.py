"""Triton kernels of rejection_verify: thresholds and the walk. The kernels of `draft_sample` sample the next token.

One program holds a whole chain. The rejection rule needs a few numbers per node, so its walk follows at once. The block
rule needs the mass of the residual at every node that has a child: one program per such node sums it, then a third
kernel walks.

Shapes: M = num_nodes packed nodes of B rows, V = vocab_size. Distributions: see `triton_shared.residual`.
    offsets_ptr int32 [B + 1]
    given_dist_index_ptr int32 [M], the caller's rows of draft distributions, of which there are num_dists
    child_ptr int32 [M], the proposal after each node, -1 for none
    reach_ptr float64 [M], block rule: probability that the path ends at the node or later
    threshold_ptr float32 [M], the uniform draw of a node is compared with it
    seeds_ptr int64 [B], root_positions_ptr int32 [B], uniforms_ptr float32 [M] (read if EXPLICIT_UNIFORMS)
    path_ptr int32 [B, max_depth + 1], num_accepted_ptr int32 [B]
    last_node_ptr int32 [B], end of the path, -1 for none
    first_rejected_ptr int32 [B], the rejected proposal after it, -1 for none
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.distribution import NEGATIVE_INFINITY
from ...triton_shared.jit import kernel
from ...triton_shared.random import accept_uniform
from ...triton_shared.residual import (
    WIDE,
    ResidualFlags,
    draft_column,
    log_weights_at,
    pack_residual_inputs,
    residual_weights,
)
from ...triton_shared.tree_links import row_bounds
from . import reference_thresholds

BEYOND = tl.constexpr(1 << 30)
LEAST_LOG_WEIGHT = tl.constexpr(reference_thresholds.LEAST_LOG_WEIGHT)


@kernel()
def compute_ratios(
    logits_ptr, inv_t_ptr, lse_ptr, cut_ptr, tie_id_ptr, logits_stride, num_columns, overlay_ptr, overlay_stride,
    q_logits_ptr, q_inv_t_ptr, q_lse_ptr, q_cut_ptr, q_tie_id_ptr, q_logits_stride, q_num_columns, draft_column_ptr,
    tokens_ptr, next_sibling_ptr, proposal_kinds_ptr, dist_index_ptr, score_only_ptr, applied_ptr, p_scale_ptr,
    q_scale_ptr, offsets_ptr, given_dist_index_ptr, child_ptr, reach_ptr, threshold_ptr, seeds_ptr, root_positions_ptr,
    uniforms_ptr, path_ptr, num_accepted_ptr, last_node_ptr, first_rejected_ptr, vocab_size, num_nodes, num_dists,
    max_depth, STEPS: tl.constexpr, BLOCK_RULE: tl.constexpr, WALK: tl.constexpr, EXPLICIT_UNIFORMS: tl.constexpr,
    IS_CHAIN: tl.constexpr, HAS_DRAFT: tl.constexpr, MAPPED: tl.constexpr, HAS_SCORE_ONLY: tl.constexpr,
    HAS_OVERLAY: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (B): child and reach (block rule) or threshold (rejection rule) of every node of a chain.

    WALK: the path too. STEPS: at least max_depth + 1. dist_index_ptr is written: the caller's rows, clamped to those
    that exist.
    """
    row = tl.program_id(0)
    inputs = pack_residual_inputs(
        logits_ptr, inv_t_ptr, lse_ptr, cut_ptr, tie_id_ptr, logits_stride, num_columns, overlay_ptr, overlay_stride,
        q_logits_ptr, q_inv_t_ptr, q_lse_ptr, q_cut_ptr, q_tie_id_ptr, q_logits_stride, q_num_columns,
        draft_column_ptr, tokens_ptr, next_sibling_ptr, proposal_kinds_ptr, dist_index_ptr, score_only_ptr, applied_ptr,
        p_scale_ptr, q_scale_ptr, vocab_size,
    )  # fmt: skip
    start, end = row_bounds(offsets_ptr, row, num_nodes)
    length = tl.minimum(end - start, max_depth + 1)
    step = tl.arange(0, STEPS)
    node = start + step
    real, inner = step < length, (step > 0) & (step < length)
    token = tl.load(tokens_ptr + node, mask=inner, other=0).to(tl.int32)
    ratio = log_weights_at(inputs.target, node - 1, token, inner, HAS_OVERLAY)
    proposed = inner
    if HAS_DRAFT:
        sampled = inner & (tl.load(proposal_kinds_ptr + node, mask=inner, other=0) != 0)
        source = tl.load(given_dist_index_ptr + node, mask=sampled, other=0)
        source = tl.minimum(tl.maximum(source, 0), num_dists - 1)
        tl.store(dist_index_ptr + node, source, mask=sampled)
        column = draft_column(draft_column_ptr, token, vocab_size, MAPPED, None)
        log_q = log_weights_at(inputs.draft, source, column, sampled, False)
        # A token without weight in q was not sampled from q. It is no proposal, and nothing is subtracted from p.
        none = sampled & (log_q < LEAST_LOG_WEIGHT)
        proposed = inner & (none == 0)
        ratio = tl.where(none, NEGATIVE_INFINITY, ratio - tl.where(sampled & (none == 0), log_q, 0.0))
    child = tl.where(step + 1 < length, node + 1, -1)
    tl.store(child_ptr + node - 1, node, mask=proposed)
    if BLOCK_RULE:
        reach = tl.full((STEPS,), 1.0, tl.float64)
        value = tl.full((), 1.0, tl.float64)
        factor = tl.exp(ratio.to(tl.float64))
        for place in range(1, length):
            value = tl.minimum(value * tl.sum(tl.where(step == place, factor, 0.0), 0), 1.0)
            reach = tl.where(step == place, value, reach)
        tl.store(reach_ptr + node, reach, mask=real)
        tl.store(p_scale_ptr + child, reach.to(tl.float32), mask=real & (child >= 0))
    else:
        threshold = tl.where(inner, tl.minimum(tl.exp(ratio), 1.0), 1.0)
        tl.store(threshold_ptr + node, threshold, mask=real)
        tl.store(p_scale_ptr + child, tl.full((STEPS,), 1.0, tl.float32), mask=real & (child >= 0))
        if WALK:
            store_path(
                threshold, inner, proposed, step, start, length, row, seeds_ptr, root_positions_ptr, uniforms_ptr,
                path_ptr, num_accepted_ptr, last_node_ptr, first_rejected_ptr, max_depth, STEPS, False,
                EXPLICIT_UNIFORMS,
            )  # fmt: skip
    tl.store(applied_ptr + child, tl.full((STEPS,), 1, tl.int32), mask=real & (child >= 0))


@triton.jit
def store_path(
    threshold, inner, proposed, step, start, length, row, seeds_ptr, root_positions_ptr, uniforms_ptr, path_ptr,
    num_accepted_ptr, last_node_ptr, first_rejected_ptr, max_depth, STEPS: tl.constexpr, BLOCK_RULE: tl.constexpr,
    EXPLICIT_UNIFORMS: tl.constexpr,
):  # fmt: skip
    """Walks one chain: path, number accepted, last node and its rejected child. proposed: among inner nodes."""
    if EXPLICIT_UNIFORMS:
        u = tl.load(uniforms_ptr + start + step, mask=inner, other=1.0)
    else:
        u = accept_uniform(tl.load(seeds_ptr + row), tl.load(root_positions_ptr + row), step)
    passed = inner & (u < threshold)
    if BLOCK_RULE:
        accepted = tl.max(tl.where(passed, step, 0), 0)
    else:
        first_failure = tl.min(tl.where((step > 0) & (passed == 0), step, BEYOND), 0)
        accepted = tl.minimum(first_failure, tl.maximum(length, 1)) - 1
    path = tl.where((step <= accepted) & (length > 0), start + step, -1)
    tl.store(path_ptr + row.to(tl.int64) * (max_depth + 1) + step, path, mask=step <= max_depth)
    tl.store(num_accepted_ptr + row, accepted)
    tl.store(last_node_ptr + row, tl.where(length > 0, start + accepted, -1))
    first_rejected = tl.max(tl.where(proposed & (step == accepted + 1), start + step, -1), 0)
    tl.store(first_rejected_ptr + row, first_rejected)


@kernel()
def walk_chains(
    threshold_ptr, child_ptr, offsets_ptr, seeds_ptr, root_positions_ptr, uniforms_ptr, path_ptr, num_accepted_ptr,
    last_node_ptr, first_rejected_ptr, num_nodes, max_depth, STEPS: tl.constexpr, EXPLICIT_UNIFORMS: tl.constexpr,
):  # fmt: skip
    """Grid (B): the walk of the block rule, from the thresholds of all nodes."""
    row = tl.program_id(0)
    start, end = row_bounds(offsets_ptr, row, num_nodes)
    length = tl.minimum(end - start, max_depth + 1)
    step = tl.arange(0, STEPS)
    inner = (step > 0) & (step < length)
    threshold = tl.load(threshold_ptr + start + step, mask=inner, other=0.0)
    proposed = inner & (tl.load(child_ptr + start + step - 1, mask=inner, other=-1) >= 0)
    store_path(
        threshold, inner, proposed, step, start, length, row, seeds_ptr, root_positions_ptr, uniforms_ptr, path_ptr,
        num_accepted_ptr, last_node_ptr, first_rejected_ptr, max_depth, STEPS, True, EXPLICIT_UNIFORMS,
    )  # fmt: skip


@kernel(*WIDE)
def block_thresholds(
    logits_ptr, inv_t_ptr, lse_ptr, cut_ptr, tie_id_ptr, logits_stride, num_columns, overlay_ptr, overlay_stride,
    q_logits_ptr, q_inv_t_ptr, q_lse_ptr, q_cut_ptr, q_tie_id_ptr, q_logits_stride, q_num_columns, draft_column_ptr,
    tokens_ptr, next_sibling_ptr, proposal_kinds_ptr, dist_index_ptr, score_only_ptr, applied_ptr, p_scale_ptr,
    q_scale_ptr, child_ptr, reach_ptr, threshold_ptr, vocab_size, TILE: tl.constexpr, IS_CHAIN: tl.constexpr,
    HAS_DRAFT: tl.constexpr, MAPPED: tl.constexpr, HAS_SCORE_ONLY: tl.constexpr, HAS_OVERLAY: tl.constexpr,
    UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (M): the block rule's threshold of one node, from the mass of its residual."""
    node = tl.program_id(0)
    child = tl.load(child_ptr + node)
    reach = tl.load(reach_ptr + node)
    threshold = reach
    lse = tl.load(lse_ptr + node)
    if (child >= 0) & (reach < 1) & (reach > 0) & (lse == lse):
        inputs = pack_residual_inputs(
            logits_ptr, inv_t_ptr, lse_ptr, cut_ptr, tie_id_ptr, logits_stride, num_columns, overlay_ptr,
            overlay_stride, q_logits_ptr, q_inv_t_ptr, q_lse_ptr, q_cut_ptr, q_tie_id_ptr, q_logits_stride,
            q_num_columns, draft_column_ptr, tokens_ptr, next_sibling_ptr, proposal_kinds_ptr, dist_index_ptr,
            score_only_ptr, applied_ptr, p_scale_ptr, q_scale_ptr, vocab_size,
        )  # fmt: skip
        flags: tl.constexpr = ResidualFlags(IS_CHAIN, HAS_DRAFT, MAPPED, HAS_SCORE_ONLY, HAS_OVERLAY, UNALIGNED)
        part = tl.zeros((TILE,), tl.float64)
        for first in range(0, vocab_size, TILE):
            rest = residual_weights(inputs, flags, node, child, -1, first + tl.arange(0, TILE), first + TILE)
            part += rest.to(tl.float64)
        mass = tl.sum(part, 0)
        threshold = tl.minimum(mass / (mass + (1.0 - reach)), reach)
    tl.store(threshold_ptr + node, threshold.to(tl.float32))
