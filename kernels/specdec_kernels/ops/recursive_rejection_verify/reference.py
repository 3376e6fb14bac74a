"""Plain PyTorch definition of recursive_rejection_verify and recursive_rejection_thresholds.

Tests: tests/kernels/test_recursive_rejection_verify.py, tests/rules/test_recursive_rejection.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._proposals.checks import DETERMINISTIC
from .._proposals.checks import check as check_trees
from .._proposals.reference import DenseTrees, pack_result, total_mass
from .._proposals.verify_arguments import Distribution, DraftTrees, Randomness, bind_trees


def check(trees: DraftTrees, randomness: Randomness | None = None, *, max_depth: int | None = None) -> None:
    """Raises ValueError for arguments that recursive_rejection_verify cannot take.

    Without max_depth, for arguments of recursive_rejection_thresholds.
    """
    op = "recursive_rejection_thresholds" if max_depth is None else "recursive_rejection_verify"
    check_trees(op, trees, randomness, max_depth=max_depth)


def _reject_children(trees: DenseTrees, node: int) -> tuple[list[float], Tensor]:
    """Accept thresholds of a node's children in order, and the residual after all of them are rejected."""
    rest, total = trees.target(node), 1.0
    thresholds = []
    for place, child in enumerate(trees.children[node]):
        token, dist = trees.tokens[child], trees.proposal(node, place)
        if dist is None:
            thresholds.append(0.0)  # no proposal, so nothing is subtracted either
            continue
        thresholds.append(min(1.0, float(rest[token]) / total / float(dist[token])))
        if trees.kinds[child] == DETERMINISTIC:
            left, epsilon = rest.clone(), 0.0
            left[token] = 0.0
        else:
            left, epsilon = (rest * (1.0 / total) - dist).clamp(min=0.0), trees.residual_epsilon
        # An empty residual: the distribution was at most the proposal's up to rounding, and so is the rejection.
        if total_mass(left) > epsilon:
            rest, total = left, total_mass(left)
    return thresholds, rest


def recursive_rejection_verify(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    proposal_kinds: Tensor,
    dist_index: Tensor,
    target: Distribution,
    draft: Distribution | None,
    token_ids: Tensor | None,
    score_only: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    uniforms: Tensor | None = None,
    gumbel_noise: tuple[Tensor, Tensor] | None = None,
    *,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Verifies draft trees by recursive rejection sampling: emitted tokens have exactly the target's distribution.

    Shapes: M packed nodes of B rows, V target ids, R draft distributions of Vd columns.

    The children of a node are tested in index order. At first, r is the target's distribution. Child x was sampled from
    Q, given earlier decisions. It is accepted iff ``u < r(x) / Q(x)``, strictly. Otherwise r becomes the normalised
    positive part of r - Q. An accepted child is the next node. If every child is rejected, the next token is sampled
    from r, and at a leaf from the target's distribution (``random.sample_from_weights``).

    Q depends on the proposal kind. Any mixture of kinds within one node is exact, duplicates included:

    - DETERMINISTIC: a point mass, so r loses that token;
    - SAMPLED: the draft distribution (siblings of SpecInfer);
    - SAMPLED_WITHOUT_EARLIER: the draft distribution without the tokens of earlier siblings sampled from the same row
      (recursive rejection, Sequoia, EAGLE-1);
    - SAMPLED_WITHOUT_DETERMINISTIC: the draft distribution without the tokens of deterministic siblings (hybrid nodes).

    A token without weight under its distribution was not sampled from it: it is rejected, and r stays as it is. If a
    sampled proposal leaves less than 2**-20 (float64: 2**-44) of r, the rejection is rounding, and r stays as it is.

    Args:
        tokens: Packed nodes in target ids, int64 [M]; the first node of a row is its root.
        offsets: First node of each row, int32 [B + 1].
        first_child: First child of each node, int32 [M], from tree_plan.
        next_sibling: Next sibling of each node, int32 [M], from tree_plan.
        proposal_kinds: Proposal kinds 0 to 3 in the order above, int8 [M]; ignored at roots.
        dist_index: Row of the draft distributions of each sampled node, int32 [M]; ignored elsewhere.
        target: (logits [M, V], inv_t [M], lse [M], cut [M], tie_id [M]). Row i is the distribution of the token after
            node i.
        draft: (logits [R, Vd], inv_t [R], lse [R], cut [R], tie_id [R]), or None if every node is deterministic.
        token_ids: Distinct target ids of the draft's columns, int64 [Vd], or None: column v is id v (Vd <= V).
        score_only: Nodes that are no proposals and never accepted, bool [M], or None.
        seeds: Request seeds, int64 [B].
        root_positions: Absolute positions of the roots, int32 [B].
        uniforms: Uniform draws in (0, 1) in place of keyed ones, float32 [M]; those of roots are ignored.
        gumbel_noise: Gumbel noise (blocks [B, ceil(V / 1024)], tokens [B, V]), float32, in place of keyed noise.
        max_depth: Capacity of a path, the root not counted.

    Returns:
        path: Packed indices, int32 [B, max_depth + 1], root first, padded with -1.
        num_accepted: int32 [B], the root not counted.
        next_token: int64 [B]. A row without nodes has path -1, 0 and next_token -1. A row that stops at a distribution
            without any weight (lse = NaN, see distribution_stats) has next_token 0.

    Raises:
        ValueError: If a shape, dtype, kind, id or distribution row is wrong, if links leave their row or do not point
            forward, or if a tree is deeper than max_depth.

    Source:
        Miao et al., SpecInfer (2024), algorithm 2; Jeon et al., recursive speculative decoding (2024), section 3;
        Chen et al., Sequoia (2024), algorithm 2; Hu et al. (2025), section 4 (hybrid nodes).
    """
    given, randomness = bind_trees(
        tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index, target, draft, token_ids, score_only,
        seeds, root_positions, uniforms, gumbel_noise,
    )  # fmt: skip
    check(given, randomness, max_depth=max_depth)
    trees = DenseTrees(given)
    draws = trees.uniforms(randomness)
    paths: list[list[int]] = []
    residuals: list[Tensor] = []
    for start, end in zip(trees.bounds[:-1], trees.bounds[1:], strict=True):
        path: list[int] = []
        node = start if end > start else -1
        while node >= 0:
            path.append(node)
            thresholds, left = _reject_children(trees, node)
            limits = torch.tensor(thresholds, dtype=trees.dtype).tolist()
            passed = [child for child, limit in zip(trees.children[node], limits, strict=True) if draws[child] < limit]
            if passed:
                node = passed[0]
                continue
            residuals.append(left)
            node = -1
        paths.append(path)
    return pack_result(paths, residuals, max_depth, randomness)


def recursive_rejection_thresholds(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    proposal_kinds: Tensor,
    dist_index: Tensor,
    target: Distribution,
    draft: Distribution | None,
    token_ids: Tensor | None,
    score_only: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the thresholds and residuals of recursive_rejection_verify, for exact checks of its distribution.

    It needs no randomness and is not for a decoding step.

    Args:
        tokens: As in recursive_rejection_verify, like all arguments. int64 [M].
        offsets: int32 [B + 1].
        first_child: int32 [M].
        next_sibling: int32 [M].
        proposal_kinds: int8 [M].
        dist_index: int32 [M].
        target: Distributions of M rows.
        draft: Distributions of R rows, or None.
        token_ids: int64 [Vd], or None.
        score_only: bool [M], or None.

    Returns:
        accept: [M], threshold of each node's uniform draw, given that the walk is at its parent and has rejected its
            earlier siblings. 1 at roots, 0 at score-only nodes, tail nodes and nodes without a parent.
        residual: [M, V], unnormalised weights of the token sampled if the walk ends at node i: all its children were
            rejected, or it has none. Zero at tail nodes. Both float32, or float64 if target or draft logits are.

    Raises:
        ValueError: As recursive_rejection_verify.
    """
    given = DraftTrees(
        tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index, target, draft, token_ids, score_only
    )
    check(given)
    trees = DenseTrees(given)
    accept = torch.zeros(len(tokens), dtype=trees.dtype)
    residual = torch.zeros_like(trees.p)
    for start, end in zip(trees.bounds[:-1], trees.bounds[1:], strict=True):
        for node in range(start, end):
            if node == start:
                accept[node] = 1.0
            thresholds, residual[node] = _reject_children(trees, node)
            accept[trees.children[node]] = torch.tensor(thresholds, dtype=trees.dtype)
    return accept.to(tokens.device), residual
