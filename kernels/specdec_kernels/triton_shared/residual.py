"""What is left of a node's distribution after some of its children were refused, tile by tile inside Triton kernels.

Nothing dense is kept between passes: a tile of what is left is the target's weights, from which the refused proposals
are taken one after another, each with two numbers (`steps`) that earlier passes found. So a later proposal costs a few
more instructions per token instead of a copy of the distribution.

The arguments come in tuples: a distribution is (logits, inv_t, lse, cut, tie_id, row stride, columns), that of the
target followed by the cells of an overlay and how many a row has; the tree is (tokens, next_sibling, drawn,
dist_index, score_only), with siblings that lead onward and distribution rows that exist
(`recursive_rejection_verify` prepares them); steps are (applied, p_scale, q_scale), one entry per node, about its own
refusal. `kind` is (chain, has draft distributions, draft columns are mapped, has score-only nodes, the target has an
overlay, rows are ragged), all known when compiling. `end` is that of a tile of ids (as in
`overlay_triton.load_tile`), None for other ids.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .distribution import NEGATIVE_INFINITY, token_weights
from .overlay import load_logits, load_tile

WIDE = ("logits", "stride", "width", "q_logits", "q_stride", "q_width", "columns", "vocab")
"""Arguments that wide loads of whole rows specialise, for `jit_triton.kernel`."""
DETERMINISTIC, WITHOUT_EARLIER, WITHOUT_CHOSEN = tl.constexpr(0), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def weights_of(dist, row, ids, FOLD: tl.constexpr, end):
    """Weights of tokens of one row of a distribution. FOLD: with its overlay."""
    row = row.to(tl.int64)
    inv_t, lse = tl.load(dist[1] + row), tl.load(dist[2] + row)
    cut, tie = tl.load(dist[3] + row), tl.load(dist[4] + row)
    if FOLD:
        return token_weights(
            dist[0] + row * dist[5], dist[7] + row * dist[8], dist[8], ids, dist[6], inv_t, lse, cut, tie, FOLD, end
        )
    else:
        return token_weights(dist[0] + row * dist[5], dist[4], 0, ids, dist[6], inv_t, lse, cut, tie, FOLD, end)


@triton.jit
def log_weights_at(dist, rows, columns, wanted, FOLD: tl.constexpr):
    """Log weight of one column of each row, -inf where it has none or is not wanted. FOLD: with the distribution's
    overlay.
    """
    wanted = wanted & (columns >= 0) & (columns < dist[6])
    inv_t = tl.load(dist[1] + rows, mask=wanted, other=0.0)
    lse = tl.load(dist[2] + rows, mask=wanted, other=0.0)
    cut = tl.load(dist[3] + rows, mask=wanted, other=0.0)
    tie = tl.load(dist[4] + rows, mask=wanted, other=-1)
    wide = rows.to(tl.int64)
    if FOLD:
        level = load_logits(
            dist[0] + wide * dist[5], dist[7] + wide * dist[8], dist[8], columns, wanted, dist[6], FOLD, None
        )
    else:
        level = tl.load(dist[0] + wide * dist[5] + columns, mask=wanted, other=NEGATIVE_INFINITY).to(tl.float32)
    kept = wanted & ((level > cut) | ((level == cut) & (columns <= tie)))
    value = tl.where(inv_t == 0, 0.0, level * inv_t - lse)
    return tl.where(kept & (value == value), value, NEGATIVE_INFINITY)


@triton.jit
def draft_column(columns, ids, vocab, MAPPED: tl.constexpr, end):
    """Columns of the draft distributions that stand for target ids, -1 for none."""
    column = ids
    if MAPPED:
        column = load_tile(columns, ids, (ids >= 0) & (ids < vocab), vocab, end, -1)
    return column


@triton.jit
def proposal_weights(tree, draft, columns, kind: tl.constexpr, first, child, ids, vocab, end):
    """Draft weights that a drawn child could have been drawn by, not yet normalised for what is excluded."""
    source = tl.load(tree[3] + child)
    tile = end if kind[5] else None
    if kind[2]:
        q = weights_of(draft, source, draft_column(columns, ids, vocab, True, tile), False, None)
    else:
        q = weights_of(draft, source, ids, False, tile)
    if not kind[0]:
        mark = tl.load(tree[2] + child)
        if mark >= WITHOUT_EARLIER:
            other = first
            while other >= 0:
                if is_excluded(tree, kind, mark, source, child, other):
                    q = tl.where(ids == tl.load(tree[0] + other).to(tl.int32), 0.0, q)
                other = tl.load(tree[1] + other)
    return q


@triton.jit
def is_excluded(tree, kind: tl.constexpr, mark, source, child, other):
    """Whether a child of this mark and source cannot be the token of a sibling."""
    chosen = tl.load(tree[2] + other) == DETERMINISTIC
    earlier = (mark == WITHOUT_EARLIER) & (chosen == 0) & (other < child) & (tl.load(tree[3] + other) == source)
    found = earlier | ((mark == WITHOUT_CHOSEN) & chosen)
    if kind[3]:
        found = found & (tl.load(tree[4] + other) == 0)
    return found


@triton.jit
def exclusions(tree, kind: tl.constexpr, first, child):
    """(whether anything is excluded from a drawn child's distribution, whether its own token is)."""
    mark, source = tl.load(tree[2] + child), tl.load(tree[3] + child)
    token = tl.load(tree[0] + child)
    something = child < 0
    itself = child < 0
    if mark >= WITHOUT_EARLIER:
        other = first
        while other >= 0:
            if is_excluded(tree, kind, mark, source, child, other):
                something = child >= 0
                itself = itself | (tl.load(tree[0] + other) == token)
            other = tl.load(tree[1] + other)
    return something, itself


@triton.jit
def subtract_rejected(rest, tree, draft, columns, steps, kind: tl.constexpr, first, child, ids, vocab, end):
    """Weights left after one refusal."""
    token = tl.load(tree[0] + child).to(tl.int32)
    scale = tl.load(steps[1] + child)
    if kind[0]:
        rest = rest * scale
    if kind[1]:
        if tl.load(tree[2] + child) == DETERMINISTIC:
            rest = tl.where(ids == token, 0.0, rest)
        else:
            q = proposal_weights(tree, draft, columns, kind, first, child, ids, vocab, end)
            if not kind[0]:
                rest = rest * scale
                q = q * tl.load(steps[2] + child)
            rest = tl.maximum(rest - q, 0.0)
    else:
        rest = tl.where(ids == token, 0.0, rest)
    return rest


@triton.jit
def residual_weights(target, tree, draft, columns, steps, kind: tl.constexpr, node, first, stop, ids, vocab, end):
    """Weights left at a node when its children from `first` up to `stop` (-1: all) were refused."""
    rest = weights_of(target, node, ids, kind[4], end if kind[5] else None)
    child = first
    while (child >= 0) & (child != stop):
        if tl.load(steps[0] + child) != 0:
            rest = subtract_rejected(rest, tree, draft, columns, steps, kind, first, child, ids, vocab, end)
        if kind[0]:
            child = child * 0 - 1
        else:
            child = tl.load(tree[1] + child)
    return rest
