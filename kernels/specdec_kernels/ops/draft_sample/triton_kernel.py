"""Triton kernels of every draw: masses of the race blocks, then the two-level race (``random.draw_from_weights``).

They serve draft_sample and the last step of all verify operators: one row per request is read, from which the refused
proposals of the row's last node are taken on the way (`rest_triton`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.distribution import NEGATIVE_INFINITY, NOISE_BLOCK, id_of_key, order_key
from ...triton_shared.jit import kernel
from ...triton_shared.random import gumbel_span, logarithm
from ...triton_shared.residual import WIDE, residual_weights

SMALLEST = tl.constexpr(1.1754943508222875e-38)
LARGEST = tl.constexpr(3.0e38)
SLACK = tl.constexpr(1e-3)  # for roundings of a block's true mass and of its noise


@triton.jit
def log_or_none(weight):
    """Logarithm of a weight, -inf below the smallest normal number."""
    return tl.where(weight >= SMALLEST, logarithm(tl.maximum(weight, SMALLEST)), NEGATIVE_INFINITY)


@kernel(*WIDE)
def masses(
    logits, inv_t, lse, cut, tie_id, stride, width, cells, room, q_logits, q_inv_t, q_lse, q_cut, q_tie, q_stride,
    q_width, columns, tokens, next_sibling, proposal_kinds, dist_index, score_only, applied, p_scale, q_scale, nodes,
    firsts,
    known, part, vocab, blocks, GROUP: tl.constexpr, KNOWN: tl.constexpr, WRITE: tl.constexpr, CHAIN: tl.constexpr,
    DRAFT: tl.constexpr, MAPPED: tl.constexpr, SCORE_ONLY: tl.constexpr, FOLD: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Masses of GROUP race blocks of what is left at nodes[b] after the children from firsts[b] on.

    WRITE: for inspection, what is left itself, of every node and whatever its distribution: part is float32 [rows,
    vocab]."""
    row = tl.program_id(0)
    node = tl.load(nodes + row)
    needed = node >= 0
    if not WRITE:  # noqa: SIM102 (known when compiling)
        if needed:
            level = tl.load(lse + node)
            needed = (tl.load(inv_t + node) != 0) & (level == level)
            if KNOWN:
                given = tl.load(known + node.to(tl.int64) * blocks)
                needed = needed & (given != given)
    if needed:
        target = (logits, inv_t, lse, cut, tie_id, stride, width, cells, room)
        draft = (q_logits, q_inv_t, q_lse, q_cut, q_tie, q_stride, q_width)
        tree = (tokens, next_sibling, proposal_kinds, dist_index, score_only)
        steps = (applied, p_scale, q_scale)
        block = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
        ids = block[:, None] * NOISE_BLOCK + tl.arange(0, NOISE_BLOCK)[None, :]
        rest = residual_weights(
            target, tree, draft, columns, steps, (CHAIN, DRAFT, MAPPED, SCORE_ONLY, FOLD, UNALIGNED), node,
            tl.load(firsts + row), -1, ids, vocab, (tl.program_id(1) + 1) * GROUP * NOISE_BLOCK,
        )  # fmt: skip
        if WRITE:
            tl.store(part + row.to(tl.int64) * vocab + ids, rest, mask=ids < vocab)
        else:
            total = tl.sum(rest.to(tl.float64), 1).to(tl.float32)
            tl.store(part + row.to(tl.int64) * blocks + block, total, mask=block < blocks)


@kernel(*WIDE)
def race(
    logits, inv_t, lse, cut, tie_id, stride, width, cells, room, q_logits, q_inv_t, q_lse, q_cut, q_tie, q_stride,
    q_width, columns, tokens, next_sibling, proposal_kinds, dist_index, score_only, applied, p_scale, q_scale, nodes,
    firsts,
    known, part, seeds, positions, index, block_noise, token_noise, out, vocab, blocks, PLACES: tl.constexpr,
    STREAM: tl.constexpr, EXPLICIT: tl.constexpr, KNOWN: tl.constexpr, FEW: tl.constexpr, CHAIN: tl.constexpr,
    DRAFT: tl.constexpr, MAPPED: tl.constexpr, SCORE_ONLY: tl.constexpr, FOLD: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """One draw per row: weighs the blocks that can win, by bounds of their masses, then races inside the winner.

    FEW: there are no bounds, every block is weighed. Rows without a node get -1, greedy rows and rows without a
    distribution tie_id, rows without any weight 0.
    """
    row = tl.program_id(0)
    node = tl.load(nodes + row)
    token = tl.full((), -1, tl.int64)
    if node >= 0:
        token = tl.load(tie_id + node).to(tl.int64)
        level = tl.load(lse + node)
        if (tl.load(inv_t + node) != 0) & (level == level):
            target = (logits, inv_t, lse, cut, tie_id, stride, width, cells, room)
            draft = (q_logits, q_inv_t, q_lse, q_cut, q_tie, q_stride, q_width)
            tree = (tokens, next_sibling, proposal_kinds, dist_index, score_only)
            steps = (applied, p_scale, q_scale)
            wide = row.to(tl.int64)
            seed, position, number = tl.load(seeds + row), tl.load(positions + row), tl.load(index + row)
            place = tl.arange(0, PLACES)
            if EXPLICIT:
                noise = tl.load(block_noise + wide * blocks + place, mask=place < blocks, other=0.0)
            else:
                noise = gumbel_span(seed, position, number, STREAM + 2, 0, PLACES)
            first = tl.load(firsts + row)
            bound = tl.full((PLACES,), LARGEST, tl.float32)
            if not FEW:
                bound = tl.load(part + wide * blocks + place, mask=place < blocks, other=0.0)
                if KNOWN:
                    given = tl.load(known + node.to(tl.int64) * blocks + place, mask=place < blocks, other=0.0)
                    if CHAIN & (first >= 0):
                        given = given * tl.load(p_scale + first)
                    bound = tl.where(given == given, given, bound)
                bound = log_or_none(bound) + SLACK + noise
            bound = tl.where(place < blocks, bound, NEGATIVE_INFINITY)
            found = tl.full((), -1, tl.int32)
            tries = tl.zeros((), tl.int32)
            while (found < 0) & (tries < 2):
                best = tl.full((), NEGATIVE_INFINITY, tl.float32)
                peak = tl.max(bound, 0)
                while (peak >= best) & (peak > NEGATIVE_INFINITY):
                    block = tl.argmax(bound, 0)
                    ids = block * NOISE_BLOCK + tl.arange(0, NOISE_BLOCK)
                    rest = residual_weights(
                        target, tree, draft, columns, steps, (CHAIN, DRAFT, MAPPED, SCORE_ONLY, FOLD, UNALIGNED), node,
                        first,
                        -1, ids, vocab, (block + 1) * NOISE_BLOCK,
                    )  # fmt: skip
                    mass = tl.sum(rest.to(tl.float64), 0).to(tl.float32)
                    score = log_or_none(mass) + tl.sum(tl.where(place == block, noise, 0.0), 0)
                    if (score > best) | ((score == best) & (block < found)):
                        best = score
                        found = block
                    bound = tl.where(place == block, NEGATIVE_INFINITY, bound)
                    peak = tl.max(bound, 0)
                tries += 1
                if (found < 0) & (tries < 2):
                    # nothing left: the proposal's distribution is the target's up to rounding; every block of the
                    # latter runs
                    first = first * 0 - 1
                    bound = tl.where(place < blocks, LARGEST, NEGATIVE_INFINITY)
            token = tl.zeros((), tl.int64)
            if found >= 0:
                ids = found * NOISE_BLOCK + tl.arange(0, NOISE_BLOCK)
                rest = residual_weights(
                    target, tree, draft, columns, steps, (CHAIN, DRAFT, MAPPED, SCORE_ONLY, FOLD, UNALIGNED), node,
                    first, -1, ids, vocab, (found + 1) * NOISE_BLOCK,
                )  # fmt: skip
                if EXPLICIT:
                    added = tl.load(token_noise + wide * vocab + ids, mask=ids < vocab, other=0.0)
                else:
                    added = gumbel_span(seed, position, number, STREAM, found * NOISE_BLOCK, NOISE_BLOCK)
                score = tl.where(ids < vocab, log_or_none(rest) + added, NEGATIVE_INFINITY)
                token = id_of_key(tl.max(order_key(score, ids), 0)).to(tl.int64)
    tl.store(out + row, token)
