"""Plain PyTorch definition of typical_verify."""

from __future__ import annotations

from math import exp

import torch
from torch import Tensor

from .._proposals.reference import Distribution, Tree, answer
from .._proposals.reference import check as check_proposals


def _all_chosen(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Marks and distribution rows of a draft whose distributions do not matter."""
    return torch.zeros_like(tokens, dtype=torch.int8), torch.full_like(tokens, -1, dtype=torch.int32)


def check(
    tokens: Tensor,
    offsets: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    target: Distribution,
    score_only: Tensor | None,
    seeds: Tensor,
    root_positions: Tensor,
    epsilon: float,
    delta: float,
    max_depth: int,
) -> None:
    """Raises ValueError for arguments that typical_verify cannot take."""
    tree = (tokens, offsets, first_child, next_sibling, None, None)
    noise = (seeds, root_positions)
    check_proposals("typical_verify", *tree, target, None, None, score_only, *noise, max_depth=max_depth)
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
    """Typical acceptance: the longest path of typical tokens, and a draw after it. Does NOT keep the target's
    distribution.

    A node's token is typical when its probability after its parent is above min(epsilon, delta * exp(-H)), H the
    entropy of that distribution in nats. Of several longest paths the one whose nodes come first among siblings is
    kept. The next token is drawn from the target's distribution at its end (``random.draw_from_weights``).

    Args: tokens, offsets, first_child, next_sibling, target, score_only, seeds, root_positions, max_depth as in
    recursive_rejection_verify; epsilon, delta: 0 or more.

    Returns: path, num_accepted, next_token, as recursive_rejection_verify.

    Raises: ValueError: wrong shape, dtype, id or number, a tree deeper than max_depth.

    Source: Cai et al., Medusa (2024), section 2.3.2.
    """
    check(
        tokens, offsets, first_child, next_sibling, target, score_only, seeds, root_positions, epsilon, delta, max_depth
    )
    links = (first_child, next_sibling, *_all_chosen(tokens))
    tree = Tree(tokens, offsets, *links, target, None, None, score_only)
    paths = []
    for start, end in zip(tree.bounds[:-1], tree.bounds[1:], strict=True):
        longest: dict[int, list[int]] = {}
        for node in reversed(range(start, end)):  # children come after their parents
            typical: list[int] = []
            if tree.children[node]:
                weights = tree.target(node)
                entropy = -float(torch.special.xlogy(weights, weights).sum(dtype=torch.float64))
                limit = min(epsilon, delta * exp(-entropy))
                typical = [child for child in tree.children[node] if float(weights[tree.token[child]]) > limit]
            longest[node] = [node, *max((longest[child] for child in typical), key=len, default=[])]
        paths.append(longest[start] if end > start else [])
    rest = [tree.target(path[-1]) for path in paths if path]
    return answer(paths, rest, max_depth, seeds, root_positions, None)
