"""Triton kernels that sample tokens: masses of noise blocks, then two-level Gumbel-max (`random.sample_from_weights`).

They serve draft_sample and the last step of all verify operators. One row of logits per request is read; the rejected
proposals of the request's last node are subtracted on load (`triton_shared.residual`).

Shapes: B samples, V = vocab_size, K = num_blocks = ceil(V / 1024) noise blocks. Statistics and links have one
entry per node, see `triton_shared.residual`.
    nodes_ptr int32 [B], node of each draw, -1 for none
    first_rejected_ptr int32 [B], first rejected child of that node, -1 for none
    known_masses_ptr float32 [nodes, K], block masses of the target's distributions; read if KNOWN
    block_masses_ptr float32 [B, K], block masses of the residuals
    seeds_ptr int64 [B], root_positions_ptr int32 [B], draw_index_ptr int32 [B]
    block_noise_ptr float32 [B, K], token_noise_ptr float32 [B, V]; read if EXPLICIT_NOISE
    out_ptr int64 [B]
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton_shared.distribution import NEGATIVE_INFINITY, NOISE_BLOCK, id_of_key, order_key
from ...triton_shared.jit import kernel
from ...triton_shared.random import gumbel_span, logarithm
from ...triton_shared.residual import WIDE, ResidualFlags, pack_residual_inputs, residual_weights

SMALLEST = tl.constexpr(1.1754943508222875e-38)
LARGEST = tl.constexpr(3.0e38)
SLACK = tl.constexpr(1e-3)  # for roundings of a block's true mass and of its noise


@triton.jit
def log_or_none(weight):
    """Logarithm of a weight, -inf below the smallest normal number."""
    return tl.where(weight >= SMALLEST, logarithm(tl.maximum(weight, SMALLEST)), NEGATIVE_INFINITY)


@kernel(*WIDE)
def sum_block_masses(
    logits_ptr, inv_t_ptr, lse_ptr, cut_ptr, tie_id_ptr, logits_stride, num_columns, overlay_ptr, overlay_stride,
    q_logits_ptr, q_inv_t_ptr, q_lse_ptr, q_cut_ptr, q_tie_id_ptr, q_logits_stride, q_num_columns, draft_column_ptr,
    tokens_ptr, next_sibling_ptr, proposal_kinds_ptr, dist_index_ptr, score_only_ptr, applied_ptr, p_scale_ptr,
    q_scale_ptr, nodes_ptr, first_rejected_ptr, known_masses_ptr, block_masses_ptr, vocab_size, num_blocks,
    GROUP: tl.constexpr, KNOWN: tl.constexpr, WRITE: tl.constexpr, IS_CHAIN: tl.constexpr, HAS_DRAFT: tl.constexpr,
    MAPPED: tl.constexpr, HAS_SCORE_ONLY: tl.constexpr, HAS_OVERLAY: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (B, ceil(K / GROUP)): masses of GROUP noise blocks of the residual of one draw.

    WRITE: for inspection, the residuals of all nodes themselves; block_masses_ptr is then float32 [B, V].
    """
    row = tl.program_id(0)
    node = tl.load(nodes_ptr + row)
    needed = node >= 0
    if not WRITE:  # noqa: SIM102 (known when compiling)
        if needed:
            lse = tl.load(lse_ptr + node)
            needed = (tl.load(inv_t_ptr + node) != 0) & (lse == lse)
            if KNOWN:
                known = tl.load(known_masses_ptr + node.to(tl.int64) * num_blocks)
                needed = needed & (known != known)
    if needed:
        inputs = pack_residual_inputs(
            logits_ptr, inv_t_ptr, lse_ptr, cut_ptr, tie_id_ptr, logits_stride, num_columns, overlay_ptr,
            overlay_stride, q_logits_ptr, q_inv_t_ptr, q_lse_ptr, q_cut_ptr, q_tie_id_ptr, q_logits_stride,
            q_num_columns, draft_column_ptr, tokens_ptr, next_sibling_ptr, proposal_kinds_ptr, dist_index_ptr,
            score_only_ptr, applied_ptr, p_scale_ptr, q_scale_ptr, vocab_size,
        )  # fmt: skip
        flags: tl.constexpr = ResidualFlags(IS_CHAIN, HAS_DRAFT, MAPPED, HAS_SCORE_ONLY, HAS_OVERLAY, UNALIGNED)
        block = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
        ids = block[:, None] * NOISE_BLOCK + tl.arange(0, NOISE_BLOCK)[None, :]
        first = tl.load(first_rejected_ptr + row)
        rest = residual_weights(inputs, flags, node, first, -1, ids, (tl.program_id(1) + 1) * GROUP * NOISE_BLOCK)
        if WRITE:
            tl.store(block_masses_ptr + row.to(tl.int64) * vocab_size + ids, rest, mask=ids < vocab_size)
        else:
            mass = tl.sum(rest.to(tl.float64), 1).to(tl.float32)
            tl.store(block_masses_ptr + row.to(tl.int64) * num_blocks + block, mass, mask=block < num_blocks)


@kernel(*WIDE)
def sample_tokens(
    logits_ptr, inv_t_ptr, lse_ptr, cut_ptr, tie_id_ptr, logits_stride, num_columns, overlay_ptr, overlay_stride,
    q_logits_ptr, q_inv_t_ptr, q_lse_ptr, q_cut_ptr, q_tie_id_ptr, q_logits_stride, q_num_columns, draft_column_ptr,
    tokens_ptr, next_sibling_ptr, proposal_kinds_ptr, dist_index_ptr, score_only_ptr, applied_ptr, p_scale_ptr,
    q_scale_ptr, nodes_ptr, first_rejected_ptr, known_masses_ptr, block_masses_ptr, seeds_ptr, root_positions_ptr,
    draw_index_ptr, block_noise_ptr, token_noise_ptr, out_ptr, vocab_size, num_blocks, PLACES: tl.constexpr,
    STREAM: tl.constexpr, EXPLICIT_NOISE: tl.constexpr, KNOWN: tl.constexpr, FEW: tl.constexpr,
    IS_CHAIN: tl.constexpr, HAS_DRAFT: tl.constexpr, MAPPED: tl.constexpr, HAS_SCORE_ONLY: tl.constexpr,
    HAS_OVERLAY: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid (B): one draw. Weighs the blocks that can win, by bounds of their masses, then selects inside the winner.

    FEW: there are no bounds, and every block is weighed. PLACES: at least K. Rows without a node get -1, greedy rows
    and rows without a distribution tie_id, rows without any weight 0.
    """
    row = tl.program_id(0)
    node = tl.load(nodes_ptr + row)
    token = tl.full((), -1, tl.int64)
    if node >= 0:
        token = tl.load(tie_id_ptr + node).to(tl.int64)
        lse = tl.load(lse_ptr + node)
        if (tl.load(inv_t_ptr + node) != 0) & (lse == lse):
            inputs = pack_residual_inputs(
                logits_ptr, inv_t_ptr, lse_ptr, cut_ptr, tie_id_ptr, logits_stride, num_columns, overlay_ptr,
                overlay_stride, q_logits_ptr, q_inv_t_ptr, q_lse_ptr, q_cut_ptr, q_tie_id_ptr, q_logits_stride,
                q_num_columns, draft_column_ptr, tokens_ptr, next_sibling_ptr, proposal_kinds_ptr, dist_index_ptr,
                score_only_ptr, applied_ptr, p_scale_ptr, q_scale_ptr, vocab_size,
            )  # fmt: skip
            flags: tl.constexpr = ResidualFlags(IS_CHAIN, HAS_DRAFT, MAPPED, HAS_SCORE_ONLY, HAS_OVERLAY, UNALIGNED)
            wide = row.to(tl.int64)
            seed, position = tl.load(seeds_ptr + row), tl.load(root_positions_ptr + row)
            index = tl.load(draw_index_ptr + row)
            place = tl.arange(0, PLACES)
            if EXPLICIT_NOISE:
                noise = tl.load(block_noise_ptr + wide * num_blocks + place, mask=place < num_blocks, other=0.0)
            else:
                noise = gumbel_span(seed, position, index, STREAM + 2, 0, PLACES)
            first = tl.load(first_rejected_ptr + row)
            bound = tl.full((PLACES,), LARGEST, tl.float32)
            if not FEW:
                bound = tl.load(block_masses_ptr + wide * num_blocks + place, mask=place < num_blocks, other=0.0)
                if KNOWN:
                    known_row_ptr = known_masses_ptr + node.to(tl.int64) * num_blocks
                    known = tl.load(known_row_ptr + place, mask=place < num_blocks, other=0.0)
                    if IS_CHAIN & (first >= 0):
                        known = known * tl.load(p_scale_ptr + first)
                    bound = tl.where(known == known, known, bound)
                bound = log_or_none(bound) + SLACK + noise
            bound = tl.where(place < num_blocks, bound, NEGATIVE_INFINITY)
            winner = tl.full((), -1, tl.int32)
            tries = tl.zeros((), tl.int32)
            while (winner < 0) & (tries < 2):
                best = tl.full((), NEGATIVE_INFINITY, tl.float32)
                peak = tl.max(bound, 0)
                while (peak >= best) & (peak > NEGATIVE_INFINITY):
                    block = tl.argmax(bound, 0)
                    ids = block * NOISE_BLOCK + tl.arange(0, NOISE_BLOCK)
                    rest = residual_weights(inputs, flags, node, first, -1, ids, (block + 1) * NOISE_BLOCK)
                    mass = tl.sum(rest.to(tl.float64), 0).to(tl.float32)
                    score = log_or_none(mass) + tl.sum(tl.where(place == block, noise, 0.0), 0)
                    if (score > best) | ((score == best) & (block < winner)):
                        best = score
                        winner = block
                    bound = tl.where(place == block, NEGATIVE_INFINITY, bound)
                    peak = tl.max(bound, 0)
                tries += 1
                if (winner < 0) & (tries < 2):
                    # The residual is empty: proposal and target are equal up to rounding. Draw from the target.
                    first = first * 0 - 1
                    bound = tl.where(place < num_blocks, LARGEST, NEGATIVE_INFINITY)
            token = tl.zeros((), tl.int64)
            if winner >= 0:
                ids = winner * NOISE_BLOCK + tl.arange(0, NOISE_BLOCK)
                rest = residual_weights(inputs, flags, node, first, -1, ids, (winner + 1) * NOISE_BLOCK)
                if EXPLICIT_NOISE:
                    token_noise = tl.load(token_noise_ptr + wide * vocab_size + ids, mask=ids < vocab_size, other=0.0)
                else:
                    token_noise = gumbel_span(seed, position, index, STREAM, winner * NOISE_BLOCK, NOISE_BLOCK)
                score = tl.where(ids < vocab_size, log_or_none(rest) + token_noise, NEGATIVE_INFINITY)
                token = id_of_key(tl.max(order_key(score, ids), 0)).to(tl.int64)
    tl.store(out_ptr + row, token)
