"""Plain PyTorch definition of typical_verify.

Tests: tests/kernels/test_typical_verify.py.
"""

from __future__ import annotations

from math import exp

import torch
from torch import Tensor

from .._proposals.checks import check as check_trees
from .._proposals.reference import DenseTrees, pack_result
from .._proposals.verify_arguments import Distribution, DraftTrees, Randomness


def bind(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    target: Distribution,
    score_only: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
) -> tuple[DraftTrees, Randomness]:
    """Bundles the arguments of typical_verify; checks nothing. The trees have no proposal kinds."""
    trees = DraftTrees(tokens, offsets, first_child, next_sibling, None, None, target, None, None, score_only)
    return trees, Randomness(seeds, root_positions, None, None)


def check(trees: DraftTrees, randomness: Randomness, epsilon: float, delta: float, max_depth: int) -> None:
    """Raises ValueError for arguments that typical_verify cannot take."""
    check_trees("typical_verify", trees, randomness, max_depth=max_depth)
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if not value >= 0:
            raise ValueError(f"typical_verify: {name} is {value}; expected 0 or more")


def typical_verify(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    target: Distribution,
    score_only: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    *,
    epsilon: float,
    delta: float,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Verifies draft trees by typical acceptance. Lossy: it does not keep the target's distribution.

    Shapes: M packed nodes of B rows, V target ids.

    A node's token is typical if its probability after its parent is above min(epsilon, delta * exp(-H)), where H is the
    entropy of that distribution in nats. The path is the longest one of typical tokens. Among equally long paths, nodes
    that come first among siblings win. The next token is sampled from the target's distribution at its end
    (``random.sample_from_weights``).

    Args:
        tokens: Packed nodes in target ids, int64 [M]; the first node of a row is its root.
        offsets: First node of each row, int32 [B + 1].
        first_child: First child of each node, int32 [M], from tree_plan.
        next_sibling: Next sibling of each node, int32 [M], from tree_plan.
        target: (logits [M, V], inv_t [M], lse [M], cut [M], tie_id [M]). Row i is the distribution of the token after
            node i.
        score_only: Nodes that are never accepted, bool [M], or None.
        seeds: Request seeds, int64 [B].
        root_positions: Absolute positions of the roots, int32 [B].
        epsilon: Largest threshold of a typical token, 0 or more.
        delta: Factor of exp(-H), 0 or more.
        max_depth: Capacity of a path, the root not counted.

    Returns:
        path: Packed indices, int32 [B, max_depth + 1], root first, padded with -1.
        num_accepted: int32 [B], the root not counted.
        next_token: int64 [B], for special rows as in recursive_rejection_verify.

    Raises:
        ValueError: If a shape, dtype, id or number is wrong, or a tree is deeper than max_depth.

    Source:
        Cai et al., Medusa (2024), section 2.3.2.
    """
    given, randomness = bind(tokens, offsets, first_child, next_sibling, target, score_only, seeds, root_positions)
    check(given, randomness, epsilon, delta, max_depth)
    kinds, rows = torch.zeros_like(tokens, dtype=torch.int8), torch.full_like(tokens, -1, dtype=torch.int32)
    trees = DenseTrees(given._replace(proposal_kinds=kinds, dist_index=rows))
    paths = []
    for start, end in zip(trees.bounds[:-1], trees.bounds[1:], strict=True):
        longest: dict[int, list[int]] = {}
        for node in reversed(range(start, end)):  # children come after their parents
            typical: list[int] = []
            if trees.children[node]:
                weights = trees.target(node)
                entropy = -float(torch.special.xlogy(weights, weights).sum(dtype=torch.float64))
                limit = min(epsilon, delta * exp(-entropy))
                typical = [child for child in trees.children[node] if float(weights[trees.tokens[child]]) > limit]
            longest[node] = [node, *max((longest[child] for child in typical), key=len, default=[])]
        paths.append(longest[start] if end > start else [])
    residuals = [trees.target(path[-1]) for path in paths if path]
    return pack_result(paths, residuals, max_depth, randomness)
