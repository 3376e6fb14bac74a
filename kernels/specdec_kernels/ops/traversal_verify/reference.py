"""Plain PyTorch definition of traversal_verify and traversal_thresholds.

Tests: tests/kernels/test_traversal_verify.py, tests/rules/test_traversal.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._proposals.checks import DETERMINISTIC
from .._proposals.checks import check as check_trees
from .._proposals.reference import DenseTrees, pack_result, total_mass
from .._proposals.verify_arguments import Distribution, DraftTrees, Randomness, bind_trees


def check(trees: DraftTrees, randomness: Randomness | None = None, *, max_depth: int | None = None) -> None:
    """Raises ValueError for arguments that traversal_verify (without max_depth: traversal_thresholds) cannot take."""
    op = "traversal_thresholds" if max_depth is None else "traversal_verify"
    check_trees(op, trees, randomness, max_depth=max_depth)


def _visit_node(trees: DenseTrees, node: int, reach: float) -> tuple[list[float], float, Tensor]:
    """Reach of a node's children in order, the node's own after all of them failed, and the residual then."""
    rest, total = trees.target(node), 1.0
    of_children = []
    for place, child in enumerate(trees.children[node]):
        token, dist = trees.tokens[child], trees.proposal(node, place)
        if dist is None or trees.has_no_distribution(node):
            of_children.append(0.0)  # no proposal, or no distribution to compare it with: nothing is subtracted
            continue
        of_children.append(min(1.0, reach * float(rest[token]) / total / float(dist[token])))
        if trees.kinds[child] == DETERMINISTIC:
            left, epsilon = rest.clone(), 0.0
            left[token] = 0.0
            share = reach * total_mass(left) / total
        else:
            left, epsilon = (rest * (reach / total) - dist).clamp(min=0.0), trees.residual_epsilon
            share = total_mass(left)
        if share > epsilon:
            rest, total = left, total_mass(left)
            reach = share / (share + (1.0 - reach))
        elif reach < 1:  # nothing is left to emit here: the subtree took all of the node's reach
            reach = 0.0
    return of_children, reach, rest


def _visit_all(trees: DenseTrees) -> tuple[Tensor, Tensor]:
    """Final reach [M] and residual [M, V] of every node."""
    reach = [0.0] * len(trees.tokens)
    residual = torch.zeros_like(trees.p)
    for start, end in zip(trees.bounds[:-1], trees.bounds[1:], strict=True):
        for node in range(start, end):  # parents come before their children
            if node == start:
                reach[node] = 1.0
            of_children, reach[node], residual[node] = _visit_node(trees, node, reach[node])
            for child, value in zip(trees.children[node], of_children, strict=True):
                reach[child] = value
    return torch.tensor(reach, dtype=trees.dtype, device=trees.p.device), residual


def traversal_verify(
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
    """Verifies draft trees from the leaves to the root: emitted tokens have exactly the target's distribution.

    Shapes: M packed nodes of B rows, V target ids, R draft distributions of Vd columns.

    Every node has a reach w (1 at the root) and a distribution P, at first the target's. Its children are visited in
    index order. Child x was sampled from Q, as in recursive_rejection_verify. Its reach is ``min(1, w P(x) / Q(x))``.
    If its whole subtree fails, let S be the total of the positive part of w P - Q. P becomes this part, normalised, and
    w becomes ``S / (S + 1 - w)``. If S = 0, w becomes 0, except that a reach of 1 stays 1 and P stays as it is. If all
    children fail, the node itself is accepted iff its uniform is below w, strictly. The next token is sampled from P.

    The path therefore ends at the first accepted node in post-order; the root is always accepted. A node whose target
    distribution has no weight (lse = NaN) is a leaf: its children have reach 0. On a chain this is block verification.
    Proposal distributions, tokens without weight and rounding are treated as in recursive_rejection_verify.

    The uniforms must be fresh in every step, because the rule reads uniforms of nodes that it does not accept. Their
    keys are the root's position and the node's index, never the position of the node's own token.

    Args:
        tokens: Packed nodes in target ids, int64 [M]; the first node of a row is its root.
        offsets: First node of each row, int32 [B + 1].
        first_child: First child of each node, int32 [M], from tree_plan.
        next_sibling: Next sibling of each node, int32 [M], from tree_plan.
        proposal_kinds: Proposal kinds, int8 [M], as in recursive_rejection_verify; ignored at roots.
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
        next_token: int64 [B], for special rows as in recursive_rejection_verify.

    Raises:
        ValueError: As recursive_rejection_verify.

    Source:
        Weng et al., traversal verification (2025), algorithm 1; on chains Sun et al., block verification (2025),
        algorithm 2.
    """
    given, randomness = bind_trees(
        tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index, target, draft, token_ids, score_only,
        seeds, root_positions, uniforms, gumbel_noise,
    )  # fmt: skip
    check(given, randomness, max_depth=max_depth)
    trees = DenseTrees(given)
    draws = trees.uniforms(randomness)
    reach, residual = _visit_all(trees)
    thresholds = reach.tolist()

    def first_accepted(root: int) -> list[int]:
        """Path from the root to the first node in post-order that is accepted; the root always is."""
        path, ways = [root], [iter(trees.children[root])]
        while True:
            child = next(ways[-1], None)
            if child is not None:
                path.append(child)
                ways.append(iter(trees.children[child]))
            elif path[-1] == root or draws[path[-1]] < thresholds[path[-1]]:
                break
            else:
                path.pop()
                ways.pop()
        return path

    bounds = zip(trees.bounds[:-1], trees.bounds[1:], strict=True)
    paths = [first_accepted(start) if end > start else [] for start, end in bounds]
    return pack_result(paths, [residual[path[-1]] for path in paths if path], max_depth, randomness)


def traversal_thresholds(
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
    """Returns the thresholds and residuals of traversal_verify, for exact checks of its distribution.

    It needs no randomness and is not for a decoding step.

    Args:
        tokens: As in traversal_verify, like all arguments. int64 [M].
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
        accept: [M], threshold of each node's uniform draw, given that every node before it in post-order failed. 1 at
            roots, 0 at score-only nodes and below them, at tail nodes and at nodes without a parent.
        residual: [M, V], unnormalised weights of the token sampled if the path ends at node i. Zero at tail nodes. Both
            float32, or float64 if target or draft logits are.

    Raises:
        ValueError: As traversal_verify.
    """
    given = DraftTrees(
        tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index, target, draft, token_ids, score_only
    )
    check(given)
    return _visit_all(DenseTrees(given))
