"""Plain PyTorch definition of traversal_verify and traversal_thresholds."""

from __future__ import annotations

import torch
from torch import Tensor

from .._proposals.reference import DETERMINISTIC, Distribution, Tree, answer, coins, mass
from .._proposals.reference import check as check_proposals


def check(*args: object, max_depth: int | None = None) -> None:
    """Raises ValueError for arguments that traversal_verify (without max_depth: traversal_thresholds) cannot take."""
    op = "traversal_thresholds" if max_depth is None else "traversal_verify"
    check_proposals(op, *args, max_depth=max_depth)  # type: ignore[arg-type]


def _visit(tree: Tree, node: int, reach: float) -> tuple[list[float], float, Tensor]:
    """Reach of a node's children in order, the node's own after all of them failed, and the weights left then."""
    rest, total = tree.target(node), 1.0
    of_children = []
    for place, child in enumerate(tree.children[node]):
        token, dist = tree.token[child], tree.proposal(node, place)
        if dist is None or tree.broken(node):
            of_children.append(
                0.0
            )  # not drawn from its distribution, or nothing to compare it with: nothing is subtracted
            continue
        of_children.append(min(1.0, reach * float(rest[token]) / total / float(dist[token])))
        if tree.mark[child] == DETERMINISTIC:
            left, least = rest.clone(), 0.0
            left[token] = 0.0
            share = reach * mass(left) / total
        else:
            left, least = (rest * (reach / total) - dist).clamp(min=0.0), tree.dust
            share = mass(left)
        if share > least:
            rest, total = left, mass(left)
            reach = share / (share + (1.0 - reach))
        elif reach < 1:  # nothing left to emit here: the subtree took all of the node's reach
            reach = 0.0
    return of_children, reach, rest


def _weigh(tree: Tree) -> tuple[Tensor, Tensor]:
    """Final reach [M] and weights left [M, V] of every node."""
    vocab = tree.dists[0].shape[1]
    reach = [0.0] * len(tree.token)
    residual = torch.zeros(len(tree.token), vocab, dtype=tree.dtype, device=tree.dists[0].device)
    for start, end in zip(tree.bounds[:-1], tree.bounds[1:], strict=True):
        for node in range(start, end):  # parents come before their children
            if node == start:
                reach[node] = 1.0
            of_children, reach[node], residual[node] = _visit(tree, node, reach[node])
            for child, value in zip(tree.children[node], of_children, strict=True):
                reach[child] = value
    return torch.tensor(reach, dtype=tree.dtype, device=tree.dists[0].device), residual


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
    race: tuple[Tensor, Tensor] | None = None,
    *,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Traversal verification on a batch of trees, from the leaves to the root: exactly the target's distribution.

    Every node has a reach w (1 at the root) and a distribution P (the target's at first). For its children x in index
    order, drawn from Q given what was decided before (see recursive_rejection_verify): the child's reach is ``min(1,
    w P(x) / Q(x))``, and when its whole subtree has failed, with S the total of the positive part of w P - Q, P
    becomes that part normalised and w becomes ``S / (S + 1 - w)`` (S = 0: 0, at reach 1 still 1 with P as it was).
    When all children have failed, the node itself is accepted iff its coin is below w, strictly, and the next token
    is drawn from P. A node whose target distribution has no weight at all (lse = NaN) is a leaf: its children have
    reach 0. So the answer is the first node in post-order whose coin passes; the root's always does. On a chain this
    is block verification. Proposal distributions, tokens without weight and rounding are treated as in
    recursive_rejection_verify.

    The coins must be fresh in every step, for the rule looks at coins of nodes that it does not accept: they are keyed
    by the root's position and the node's place, never by the position of the node's own token.

    Args: as in recursive_rejection_verify. uniforms: the root's is ignored.

    Returns: as recursive_rejection_verify: path int32 [B, max_depth + 1], num_accepted int32 [B], next_token int64 [B].

    Raises:
        ValueError: as recursive_rejection_verify.

    Sources: Weng et al., traversal verification (2025), algorithm 1; on chains Sun et al., block verification (2025),
    algorithm 2.
    """
    check(tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index, target, draft, token_ids, score_only,
        seeds,
          root_positions, uniforms, race, max_depth=max_depth)  # fmt: skip
    tree = Tree(
        tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index, target, draft, token_ids, score_only
    )
    coin = coins(tree, seeds, root_positions, len(tokens)) if uniforms is None else uniforms.tolist()
    reach, residual = _weigh(tree)
    limit = reach.tolist()

    def first_to_pass(root: int) -> list[int]:
        """Path from the root to the first node in post-order whose coin passes; the root's always does."""
        path, ways = [root], [iter(tree.children[root])]
        while True:
            child = next(ways[-1], None)
            if child is not None:
                path.append(child)
                ways.append(iter(tree.children[child]))
            elif path[-1] == root or coin[path[-1]] < limit[path[-1]]:
                break
            else:
                path.pop()
                ways.pop()
        return path

    bounds = zip(tree.bounds[:-1], tree.bounds[1:], strict=True)
    paths = [first_to_pass(start) if end > start else [] for start, end in bounds]
    rest = [residual[path[-1]] for path in paths if path]
    return answer(paths, rest, max_depth, seeds, root_positions, race)


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
    """What traversal_verify would do, without its randomness: for exact checks of its distribution, not for a
    decoding step.

    Args: as in recursive_rejection_verify.

    Returns:
        accept: [M], threshold of each node's coin, given that every node before it in post-order failed: 1 at roots, 0
        at score-only nodes and below them, at tail nodes and at nodes without a parent.
        residual: [M, V], unnormalised weights of the token drawn if node i is the one accepted. Zero at tail nodes.
        Both float32, float64 if target or draft logits are.

    Raises:
        ValueError: as recursive_rejection_verify.
    """
    check(tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index, target, draft, token_ids, score_only)
    tree = Tree(
        tokens, offsets, first_child, next_sibling, proposal_kinds, dist_index, target, draft, token_ids, score_only
    )
    return _weigh(tree)
