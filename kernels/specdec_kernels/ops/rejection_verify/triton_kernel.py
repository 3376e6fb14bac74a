"""Triton kernels of rejection_verify: accept thresholds and the walk; the draw is that of `draft_sample`.

One program holds a whole chain. The rejection rule needs a few numbers per node, so it walks at once. The block rule
needs what is left of the distribution at every node that has a child: one program per such node sums it, then the
walk follows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.distribution import LEAST_LOG_WEIGHT, NEGATIVE_INFINITY
from ...triton_shared.jit import kernel
from ...triton_shared.random import accept_uniform
from ...triton_shared.residual import WIDE, draft_column, log_weights_at, residual_weights
from ...triton_shared.tree_links import row_bounds

BEYOND = tl.constexpr(1 << 30)


@kernel()
def ratios(
    logits, inv_t, lse, cut, tie_id, stride, width, cells, room, q_logits, q_inv_t, q_lse, q_cut, q_tie, q_stride,
    q_width, columns, tokens, next_sibling, proposal_kinds, dist_index, score_only, applied, p_scale, q_scale, offsets,
    source,
    children, reach, threshold, seeds, positions, uniforms, path, accepted, last, firsts, vocab, nodes, dists, depth,
    STEPS: tl.constexpr, BLOCK_RULE: tl.constexpr, WALK: tl.constexpr, EXPLICIT: tl.constexpr, CHAIN: tl.constexpr,
    DRAFT: tl.constexpr, MAPPED: tl.constexpr, SCORE_ONLY: tl.constexpr, FOLD: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Of one chain: every node's child and reach (block rule) or threshold (token rule), and with WALK its path.

    dist_index is written: of `source`, the rows of `dists` draft distributions that exist."""
    row = tl.program_id(0)
    start, end = row_bounds(offsets, row, nodes)
    count = tl.minimum(end - start, depth + 1)
    step = tl.arange(0, STEPS)
    node = start + step
    real, inner = step < count, (step > 0) & (step < count)
    token = tl.load(tokens + node, mask=inner, other=0).to(tl.int32)
    target = (logits, inv_t, lse, cut, tie_id, stride, width, cells, room)
    ratio = log_weights_at(target, node - 1, token, inner, FOLD)
    proposed = inner
    if DRAFT:
        draft = (q_logits, q_inv_t, q_lse, q_cut, q_tie, q_stride, q_width)
        from_dist = inner & (tl.load(proposal_kinds + node, mask=inner, other=0) != 0)
        own = tl.minimum(tl.maximum(tl.load(source + node, mask=from_dist, other=0), 0), dists - 1)
        tl.store(dist_index + node, own, mask=from_dist)
        log_q = log_weights_at(draft, own, draft_column(columns, token, vocab, MAPPED, None), from_dist, False)
        # no weight in q: x was not drawn from this distribution, so it is no proposal and says nothing of what is
        # left of p
        none = from_dist & (log_q < LEAST_LOG_WEIGHT)
        proposed = inner & (none == 0)
        ratio = tl.where(none, NEGATIVE_INFINITY, ratio - tl.where(from_dist & (none == 0), log_q, 0.0))
    child = tl.where(step + 1 < count, node + 1, -1)
    tl.store(children + node - 1, node, mask=proposed)
    if BLOCK_RULE:
        chance = tl.full((STEPS,), 1.0, tl.float64)
        value = tl.full((), 1.0, tl.float64)
        factor = tl.exp(ratio.to(tl.float64))
        for place in range(1, count):
            value = tl.minimum(value * tl.sum(tl.where(step == place, factor, 0.0), 0), 1.0)
            chance = tl.where(step == place, value, chance)
        tl.store(reach + node, chance, mask=real)
        tl.store(p_scale + child, chance.to(tl.float32), mask=real & (child >= 0))
    else:
        limit = tl.where(inner, tl.minimum(tl.exp(ratio), 1.0), 1.0)
        tl.store(threshold + node, limit, mask=real)
        tl.store(p_scale + child, tl.full((STEPS,), 1.0, tl.float32), mask=real & (child >= 0))
        if WALK:
            walk_one(
                limit, inner, proposed, step, start, count, row, seeds, positions, uniforms, path, accepted, last,
                firsts, depth, STEPS, False, EXPLICIT,
            )  # fmt: skip
    tl.store(applied + child, tl.full((STEPS,), 1, tl.int32), mask=real & (child >= 0))


@triton.jit
def walk_one(
    limit, inner, proposed, step, start, count, row, seeds, positions, uniforms, path, accepted, last, firsts, depth,
    STEPS: tl.constexpr, BLOCK_RULE: tl.constexpr, EXPLICIT: tl.constexpr,
):  # fmt: skip
    """Path, number accepted, last node and its refused child (-1: none) of one chain. proposed: of inner nodes."""
    if EXPLICIT:
        u = tl.load(uniforms + start + step, mask=inner, other=1.0)
    else:
        u = accept_uniform(tl.load(seeds + row), tl.load(positions + row), step)
    passed = inner & (u < limit)
    if BLOCK_RULE:
        length = tl.max(tl.where(passed, step, 0), 0)
    else:
        length = tl.minimum(tl.min(tl.where((step > 0) & (passed == 0), step, BEYOND), 0), tl.maximum(count, 1)) - 1
    nodes = tl.where((step <= length) & (count > 0), start + step, -1)
    tl.store(path + row.to(tl.int64) * (depth + 1) + step, nodes, mask=step <= depth)
    tl.store(accepted + row, length)
    tl.store(last + row, tl.where(count > 0, start + length, -1))
    tl.store(firsts + row, tl.max(tl.where(proposed & (step == length + 1), start + step, -1), 0))


@kernel()
def walk(
    threshold, children, offsets, seeds, positions, uniforms, path, accepted, last, firsts, nodes, depth,
    STEPS: tl.constexpr, EXPLICIT: tl.constexpr,
):  # fmt: skip
    """The walk of the block rule, from thresholds that are known."""
    row = tl.program_id(0)
    start, end = row_bounds(offsets, row, nodes)
    count = tl.minimum(end - start, depth + 1)
    step = tl.arange(0, STEPS)
    inner = (step > 0) & (step < count)
    limit = tl.load(threshold + start + step, mask=inner, other=0.0)
    proposed = inner & (tl.load(children + start + step - 1, mask=inner, other=-1) >= 0)
    walk_one(
        limit, inner, proposed, step, start, count, row, seeds, positions, uniforms, path, accepted, last, firsts,
        depth, STEPS, True, EXPLICIT,
    )  # fmt: skip


@kernel(*WIDE)
def shares(
    logits, inv_t, lse, cut, tie_id, stride, width, cells, room, q_logits, q_inv_t, q_lse, q_cut, q_tie, q_stride,
    q_width, columns, tokens, next_sibling, proposal_kinds, dist_index, score_only, applied, p_scale, q_scale,
    children, reach,
    threshold, vocab, TILE: tl.constexpr, CHAIN: tl.constexpr, DRAFT: tl.constexpr, MAPPED: tl.constexpr,
    SCORE_ONLY: tl.constexpr, FOLD: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Block rule: the threshold of one node, from the total of what is left there."""
    node = tl.program_id(0)
    child = tl.load(children + node)
    chance = tl.load(reach + node)
    share = chance
    norm = tl.load(lse + node)
    if (child >= 0) & (chance < 1) & (chance > 0) & (norm == norm):
        target = (logits, inv_t, lse, cut, tie_id, stride, width, cells, room)
        draft = (q_logits, q_inv_t, q_lse, q_cut, q_tie, q_stride, q_width)
        tree = (tokens, next_sibling, proposal_kinds, dist_index, score_only)
        steps = (applied, p_scale, q_scale)
        part = tl.zeros((TILE,), tl.float64)
        for first in range(0, vocab, TILE):
            rest = residual_weights(
                target, tree, draft, columns, steps, (CHAIN, DRAFT, MAPPED, SCORE_ONLY, FOLD, UNALIGNED), node, child,
                -1, first + tl.arange(0, TILE), vocab, first + TILE,
            )  # fmt: skip
            part += rest.to(tl.float64)
        left = tl.sum(part, 0)
        share = tl.minimum(left / (left + (1.0 - chance)), chance)
    tl.store(threshold + node, share.to(tl.float32))
