"""Residual distributions inside Triton kernels: the distribution of a node after rejections of its children.

No dense residual is stored between passes. A kernel computes a tile from the target's weights and subtracts the
rejected proposals one after another. Each subtraction needs two numbers (`Rejections`) from earlier passes. It costs a
few instructions per token instead of a copy of the distribution.

Shapes: M nodes, R rows of draft distributions, V = vocab_size, Vd columns of draft logits.

NamedTuples exist inside kernels only. A launch passes flat arguments, and `pack_residual_inputs` packs them at the top
of each kernel: Triton 3.6 to 3.9 specialise the fields of a NamedTuple argument even if `do_not_specialize` names it,
so counts and alignments that vary during serving would recompile kernels. Constants are passed separately in
`ResidualFlags`, because Triton converts constants among tensors into tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .distribution import NEGATIVE_INFINITY, token_weights
from .overlay import load_logits, load_tile

WIDE = (
    "logits_ptr", "logits_stride", "num_columns", "q_logits_ptr", "q_logits_stride", "q_num_columns",
    "draft_column_ptr", "vocab_size",
)  # fmt: skip
"""Arguments that `jit.kernel` must specialise for wide loads of whole rows."""
DETERMINISTIC, WITHOUT_EARLIER, WITHOUT_DETERMINISTIC = tl.constexpr(0), tl.constexpr(2), tl.constexpr(3)


class Distributions(NamedTuple):
    """Rows of logits and their statistics, as `distribution_stats` returns them."""

    logits_ptr: Any  # [rows, num_columns], row stride logits_stride
    inv_t_ptr: Any  # float32 [rows]
    lse_ptr: Any  # float32 [rows]
    cut_ptr: Any  # float32 [rows]
    tie_id_ptr: Any  # int32 [rows]
    logits_stride: Any
    num_columns: Any
    overlay_ptr: Any  # int32 [rows, overlay_stride]; not read without an overlay
    overlay_stride: Any


class ProposalTree(NamedTuple):
    """Tokens and proposal kinds of packed nodes. Links lead to later nodes, and draft distribution rows exist."""

    tokens_ptr: Any  # int64 [M]
    next_sibling_ptr: Any  # int32 [M]; not read for chains
    proposal_kinds_ptr: Any  # int8 [M]
    dist_index_ptr: Any  # int32 [M]
    score_only_ptr: Any  # int8 [M]; not read without score-only nodes


class Rejections(NamedTuple):
    """Effect of a node's rejection on the distribution of its parent."""

    applied_ptr: Any  # int32 [M], whether the rejection changes the distribution
    p_scale_ptr: Any  # float32 [M], factor of the residual before it
    q_scale_ptr: Any  # float32 [M], factor of its proposal


class ResidualFlags(NamedTuple):
    """Compile-time properties of the call. Kernels declare them as tl.constexpr."""

    is_chain: Any  # nodes have at most one child
    has_draft: Any  # there are draft distributions
    mapped: Any  # draft columns map to other token ids
    has_score_only: Any  # there are score-only nodes
    has_overlay: Any  # the target's logits have an overlay
    unaligned: Any  # see `jit.unaligned_vocab`


class ResidualInputs(NamedTuple):
    """All inputs of a residual distribution."""

    target: Distributions  # rows are nodes
    draft: Distributions  # rows are draft distributions
    draft_column_ptr: Any  # int32 [V], draft column of each token id, -1 for none; read if draft columns are mapped
    tree: ProposalTree
    rejections: Rejections
    vocab_size: Any


@triton.jit
def pack_residual_inputs(
    logits_ptr, inv_t_ptr, lse_ptr, cut_ptr, tie_id_ptr, logits_stride, num_columns, overlay_ptr, overlay_stride,
    q_logits_ptr, q_inv_t_ptr, q_lse_ptr, q_cut_ptr, q_tie_id_ptr, q_logits_stride, q_num_columns, draft_column_ptr,
    tokens_ptr, next_sibling_ptr, proposal_kinds_ptr, dist_index_ptr, score_only_ptr, applied_ptr, p_scale_ptr,
    q_scale_ptr, vocab_size,
):  # fmt: skip
    """Packs a kernel's arguments, in the order of `ResidualArguments.tensors` of `draft_sample.launch`."""
    target = Distributions(
        logits_ptr, inv_t_ptr, lse_ptr, cut_ptr, tie_id_ptr, logits_stride, num_columns, overlay_ptr, overlay_stride
    )
    draft = Distributions(
        q_logits_ptr, q_inv_t_ptr, q_lse_ptr, q_cut_ptr, q_tie_id_ptr, q_logits_stride, q_num_columns, overlay_ptr, 0
    )
    tree = ProposalTree(tokens_ptr, next_sibling_ptr, proposal_kinds_ptr, dist_index_ptr, score_only_ptr)
    rejections = Rejections(applied_ptr, p_scale_ptr, q_scale_ptr)
    return ResidualInputs(target, draft, draft_column_ptr, tree, rejections, vocab_size)


@triton.jit
def weights_of_row(dists, row, ids, HAS_OVERLAY: tl.constexpr, tile_end):
    """Returns the float32 weights of tokens `ids` of one row. tile_end: see `overlay.load_tile`."""
    row = row.to(tl.int64)
    inv_t, lse = tl.load(dists.inv_t_ptr + row), tl.load(dists.lse_ptr + row)
    cut, tie_id = tl.load(dists.cut_ptr + row), tl.load(dists.tie_id_ptr + row)
    return token_weights(
        dists.logits_ptr + row * dists.logits_stride, dists.overlay_ptr + row * dists.overlay_stride,
        dists.overlay_stride, ids, dists.num_columns, inv_t, lse, cut, tie_id, HAS_OVERLAY, tile_end,
    )  # fmt: skip


@triton.jit
def log_weights_at(dists, rows, columns, wanted, HAS_OVERLAY: tl.constexpr):
    """Returns the log weight of one column per row; -inf if it has no weight or is not wanted."""
    wanted = wanted & (columns >= 0) & (columns < dists.num_columns)
    inv_t = tl.load(dists.inv_t_ptr + rows, mask=wanted, other=0.0)
    lse = tl.load(dists.lse_ptr + rows, mask=wanted, other=0.0)
    cut = tl.load(dists.cut_ptr + rows, mask=wanted, other=0.0)
    tie_id = tl.load(dists.tie_id_ptr + rows, mask=wanted, other=-1)
    wide = rows.to(tl.int64)
    logits_ptr = dists.logits_ptr + wide * dists.logits_stride
    if HAS_OVERLAY:
        level = load_logits(
            logits_ptr, dists.overlay_ptr + wide * dists.overlay_stride, dists.overlay_stride, columns, wanted,
            dists.num_columns, HAS_OVERLAY, None,
        )  # fmt: skip
    else:
        level = tl.load(logits_ptr + columns, mask=wanted, other=NEGATIVE_INFINITY).to(tl.float32)
    kept = wanted & ((level > cut) | ((level == cut) & (columns <= tie_id)))
    value = tl.where(inv_t == 0, 0.0, level * inv_t - lse)
    return tl.where(kept & (value == value), value, NEGATIVE_INFINITY)


@triton.jit
def draft_column(draft_column_ptr, ids, vocab_size, MAPPED: tl.constexpr, tile_end):
    """Returns the draft column of each token id; -1 for none."""
    column = ids
    if MAPPED:
        column = load_tile(draft_column_ptr, ids, (ids >= 0) & (ids < vocab_size), vocab_size, tile_end, -1)
    return column


@triton.jit
def proposal_weights(inputs, flags: tl.constexpr, first, child, ids, tile_end):
    """Computes the draft weights from which a child was sampled.

    first: first sibling of the child.

    Returns:
        float32 weights of tokens `ids`, without normalisation after exclusions.
    """
    tree = inputs.tree
    source = tl.load(tree.dist_index_ptr + child)
    tile_end = tile_end if flags.unaligned else None
    if flags.mapped:
        column = draft_column(inputs.draft_column_ptr, ids, inputs.vocab_size, True, tile_end)
        q = weights_of_row(inputs.draft, source, column, False, None)
    else:
        q = weights_of_row(inputs.draft, source, ids, False, tile_end)
    if not flags.is_chain:
        kind = tl.load(tree.proposal_kinds_ptr + child)
        if kind >= WITHOUT_EARLIER:
            other = first
            while other >= 0:
                if is_excluded(inputs, flags, kind, source, child, other):
                    q = tl.where(ids == tl.load(tree.tokens_ptr + other).to(tl.int32), 0.0, q)
                other = tl.load(tree.next_sibling_ptr + other)
    return q


@triton.jit
def is_excluded(inputs, flags: tl.constexpr, kind, source, child, other):
    """Returns whether a child of this proposal kind and draft distribution cannot have the token of a sibling."""
    tree = inputs.tree
    deterministic = tl.load(tree.proposal_kinds_ptr + other) == DETERMINISTIC
    earlier = (kind == WITHOUT_EARLIER) & (deterministic == 0) & (other < child)
    earlier = earlier & (tl.load(tree.dist_index_ptr + other) == source)
    found = earlier | ((kind == WITHOUT_DETERMINISTIC) & deterministic)
    if flags.has_score_only:
        found = found & (tl.load(tree.score_only_ptr + other) == 0)
    return found


@triton.jit
def exclusions(inputs, flags: tl.constexpr, first, child):
    """Returns whether a sampled child's distribution excludes any token, and whether it excludes the child's token."""
    tree = inputs.tree
    kind, source = tl.load(tree.proposal_kinds_ptr + child), tl.load(tree.dist_index_ptr + child)
    token = tl.load(tree.tokens_ptr + child)
    anything = child < 0
    itself = child < 0
    if kind >= WITHOUT_EARLIER:
        other = first
        while other >= 0:
            if is_excluded(inputs, flags, kind, source, child, other):
                anything = child >= 0
                itself = itself | (tl.load(tree.tokens_ptr + other) == token)
            other = tl.load(tree.next_sibling_ptr + other)
    return anything, itself


@triton.jit
def subtract_rejected(rest, inputs, flags: tl.constexpr, first, child, ids, tile_end):
    """Returns the weights of tokens `ids` after one more rejection."""
    token = tl.load(inputs.tree.tokens_ptr + child).to(tl.int32)
    scale = tl.load(inputs.rejections.p_scale_ptr + child)
    if flags.is_chain:
        rest = rest * scale
    if flags.has_draft:
        if tl.load(inputs.tree.proposal_kinds_ptr + child) == DETERMINISTIC:
            rest = tl.where(ids == token, 0.0, rest)
        else:
            q = proposal_weights(inputs, flags, first, child, ids, tile_end)
            if not flags.is_chain:
                rest = rest * scale
                q = q * tl.load(inputs.rejections.q_scale_ptr + child)
            rest = tl.maximum(rest - q, 0.0)
    else:
        rest = tl.where(ids == token, 0.0, rest)
    return rest


@triton.jit
def residual_weights(inputs, flags: tl.constexpr, node, first, stop, ids, tile_end):
    """Returns the weights of tokens `ids` after rejection of the children from `first` up to `stop` (-1: all)."""
    rest = weights_of_row(inputs.target, node, ids, flags.has_overlay, tile_end if flags.unaligned else None)
    child = first
    while (child >= 0) & (child != stop):
        if tl.load(inputs.rejections.applied_ptr + child) != 0:
            rest = subtract_rejected(rest, inputs, flags, first, child, ids, tile_end)
        if flags.is_chain:
            child = child * 0 - 1
        else:
            child = tl.load(inputs.tree.next_sibling_ptr + child)
    return rest
